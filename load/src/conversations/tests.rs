use super::*;
use std::collections::HashSet;

#[test]
fn equal_seeds_give_equal_requests() {
    assert_eq!(Conversations::first(7, 2000), Conversations::first(7, 2000));
    assert_ne!(Conversations::first(7, 2000), Conversations::first(8, 2000));
}

#[test]
fn a_seed_gives_the_same_requests_for_ever() {
    let requests = Conversations::first(0, 1000);
    let tokens: u64 = requests.iter().map(Request::tokens).sum();
    assert_eq!((tokens, requests.last().unwrap().arrival.as_secs()), (6_731_333, 474));
}

#[test]
fn a_shorter_workload_is_the_beginning_of_a_longer() {
    let longer = Conversations::first(3, 500);
    assert_eq!(Conversations::first(3, 100), longer[..100]);
}

#[test]
fn requests_arrive_in_order_with_an_id_a_block() {
    let requests = Conversations::first(1, 5000);
    assert!(requests.is_sorted_by_key(|request| request.arrival));
    for request in &requests {
        assert!((1..=CONTEXT_TOKENS_MAX).contains(&request.input_tokens) && request.output_tokens > 0);
        assert_eq!(u64::from(request.hashed_tokens), request.tokens());
        assert_eq!(request.hash_ids.len(), request.hashed_tokens.div_ceil(HASH_BLOCK_TOKENS) as usize);
        let distinct: HashSet<_> = request.hash_ids.iter().collect();
        assert_eq!(distinct.len(), request.hash_ids.len(), "a block repeated within a prompt");
    }
}

#[test]
fn prompts_share_prefixes_and_turns_grow() {
    let requests = Conversations::first(1, 5000);
    let mut seen = HashSet::new();
    let all: usize = requests.iter().map(|request| request.hash_ids.len()).sum();
    let again = requests.iter().flat_map(|r| &r.hash_ids).filter(|id| !seen.insert(**id)).count();
    let share = again as f64 / all as f64;
    assert!((0.4..0.95).contains(&share), "{share} of the prompt blocks have been seen before");
}
