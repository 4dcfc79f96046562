use super::*;
use std::collections::HashSet;

#[test]
fn equal_seeds_give_equal_requests() {
    assert_eq!(Conversations::trace(7, 2000), Conversations::trace(7, 2000));
    assert_ne!(Conversations::trace(7, 2000).requests, Conversations::trace(8, 2000).requests);
}

/// A seed gives the same requests on every machine and in every version.
#[test]
fn a_seed_gives_the_same_requests_for_ever() {
    let trace = Conversations::trace(0, 1000);
    let tokens: u64 = trace.requests.iter().map(Request::tokens).sum();
    assert_eq!((tokens, trace.span().as_secs()), (6_731_333, 474));
}

#[test]
fn a_shorter_workload_is_the_beginning_of_a_longer() {
    let longer = Conversations::trace(3, 500).requests;
    assert_eq!(Conversations::trace(3, 100).requests, longer[..100]);
}

#[test]
fn requests_arrive_in_order_with_an_id_a_block() {
    let trace = Conversations::trace(1, 5000);
    assert!(trace.requests.is_sorted_by_key(|request| request.arrival));
    for request in &trace.requests {
        assert!((1..=CONTEXT_TOKENS_MAX).contains(&request.input_tokens) && request.output_tokens > 0);
        assert_eq!(u64::from(request.hashed_tokens), request.tokens());
        assert_eq!(request.hash_ids.len(), request.hashed_tokens.div_ceil(HASH_BLOCK_TOKENS) as usize);
        let distinct: HashSet<_> = request.hash_ids.iter().collect();
        assert_eq!(distinct.len(), request.hash_ids.len(), "a block repeated within a prompt");
    }
}

#[test]
fn prompts_share_prefixes_and_turns_grow() {
    let trace = Conversations::trace(1, 5000);
    let mut seen = HashSet::new();
    let all: usize = trace.requests.iter().map(|request| request.hash_ids.len()).sum();
    let again = trace.requests.iter().flat_map(|r| &r.hash_ids).filter(|id| !seen.insert(**id)).count();
    let share = again as f64 / all as f64;
    assert!((0.4..0.95).contains(&share), "{share} of the prompt blocks have been seen before");
}
