use super::*;
use crate::request::HASH_BLOCK_TOKENS;
use std::collections::{HashMap, HashSet};

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

#[test]
fn turns_of_a_conversation_follow_the_answer_and_the_think_time() {
    let mut ends: HashMap<_, (Duration, u64)> = HashMap::new();
    let mut later_turns = 0;
    for request in Conversations::first(1, 2000) {
        let turn = request.turn.expect("a conversation");
        let answer = ANSWER_TOKEN * request.output_tokens;
        if let Some((end, tokens)) = ends.get(&turn.session) {
            assert!((*end + turn.think).abs_diff(request.arrival) < Duration::from_micros(1));
            assert!(u64::from(request.input_tokens) > *tokens, "the prompt grows");
            later_turns += 1;
        }
        ends.insert(turn.session, (request.arrival + answer, request.tokens()));
    }
    assert!(later_turns > 1000 && ends.len() > 100, "{later_turns} {}", ends.len());
}
