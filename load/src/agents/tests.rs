use std::collections::{HashMap, HashSet};

use super::*;
use crate::request::HASH_BLOCK_TOKENS;

fn median<T: Ord + Copy>(mut values: Vec<T>) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
fn equal_seeds_give_equal_requests_and_shorter_workloads_are_their_beginning() {
    let requests = Agents::first(7, 2000);
    assert_eq!(requests, Agents::first(7, 2000));
    assert_eq!(requests[..300], Agents::first(7, 300));
    assert_ne!(requests, Agents::first(8, 2000));
}

#[test]
fn a_seed_gives_the_same_requests_for_ever() {
    let requests = Agents::first(0, 1000);
    let tokens: u64 = requests.iter().map(Request::tokens).sum();
    assert_eq!((tokens, requests.last().unwrap().arrival.as_secs()), (10_054_206, 1252));
}

#[test]
fn requests_arrive_in_order_with_an_id_a_block() {
    let requests = Agents::first(1, 5000);
    assert!(requests.is_sorted_by_key(|request| request.arrival));
    for request in &requests {
        assert!((1..=CONTEXT_TOKENS_MAX).contains(&request.input_tokens) && request.output_tokens > 0);
        assert_eq!(u64::from(request.hashed_tokens), request.tokens());
        assert_eq!(request.hash_ids.len(), request.hashed_tokens.div_ceil(HASH_BLOCK_TOKENS) as usize);
        let distinct: HashSet<_> = request.hash_ids.iter().collect();
        assert_eq!(distinct.len(), request.hash_ids.len(), "a block repeated within a prompt");
    }
}

/// An eighth of the published lengths, and their times.
#[test]
fn the_shape_is_that_of_published_sessions() {
    let requests = Agents::first(1, 20_000);
    let of_agents = || requests.iter().filter(|request| request.turn.unwrap().parent.is_none());
    let prompt = median(of_agents().map(|request| request.input_tokens).collect());
    assert!((8_000..16_000).contains(&prompt), "{prompt}");
    assert!((22..31).contains(&median(of_agents().map(|request| request.output_tokens).collect())));
    let mut thinks: Vec<_> = of_agents().map(|request| request.turn.unwrap().think.as_secs()).collect();
    thinks.sort_unstable();
    let [half, tenth, hundredth] = [50, 90, 99].map(|percent| thinks[thinks.len() * percent / 100]);
    assert!((6..16).contains(&half), "{half}");
    assert!((90..300).contains(&tenth) && (900..4_000).contains(&hundredth), "{tenth} {hundredth}");

    let mut seen = HashSet::new();
    let all: usize = requests.iter().map(|request| request.hash_ids.len()).sum();
    let again = requests.iter().flat_map(|r| &r.hash_ids).filter(|id| !seen.insert(**id)).count();
    let share = again as f64 / all as f64;
    assert!((0.94..0.99).contains(&share), "{share} of the blocks have been seen before");
    let subagents = requests.len() - of_agents().count();
    assert!((0.1..0.4).contains(&(subagents as f64 / requests.len() as f64)), "{subagents}");
}

/// A turn follows the answer and the think time; a subagent an answer of its parent, which waits.
#[test]
fn turns_follow_one_another_and_wait_for_subagents() {
    let mut ends: HashMap<SessionId, Duration> = HashMap::new();
    let mut waits: HashMap<SessionId, Duration> = HashMap::new();
    let mut later = 0;
    for request in Agents::first(3, 5000) {
        let Turn { session, parent, think } = request.turn.unwrap();
        let is_first = !ends.contains_key(&session);
        let before = match parent {
            Some(parent) if is_first => Some(ends[&parent]),
            _ => ends.get(&session).copied(),
        };
        if let Some(before) = before {
            let joined = waits.remove(&session).unwrap_or_default();
            assert_eq!(request.arrival, (before + think).max(joined));
            later += 1;
        }
        let end = request.arrival + ANSWER_TOKEN * request.output_tokens;
        ends.insert(session, end);
        if let Some(parent) = parent {
            let wait = waits.entry(parent).or_default();
            *wait = end.max(*wait);
        }
    }
    assert!(later > 4000, "{later}");
}
