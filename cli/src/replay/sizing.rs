//! A pool size for a trace: enough blocks to serve it, few enough that the pool is full at times.

use std::collections::HashMap;

use kvpool_load::Request;

use super::costs::Costs;

/// The size in percent of the blocks at the busiest moment. Then a third of the requests waits or
/// is preempted, but most of the time none is.
const SHARE_PERCENT: u64 = 65;

/// Mean nanoseconds between tokens: a decoding step, and the prompts in between.
const DECODE_NS: u64 = 20_000_000;

/// Returns a fixed share of the blocks in use at the busiest moment, if each request had all of its
/// blocks from arrival to end; at least the blocks of the largest request. `blocks_of` returns
/// those of a number of tokens.
pub fn blocks_for(requests: &[Request], blocks_of: impl Fn(u64) -> usize) -> usize {
    let mut changes: Vec<(u64, i64)> = Vec::with_capacity(2 * requests.len());
    let mut largest = 1;
    for request in requests {
        let blocks = blocks_of(request.tokens());
        largest = largest.max(blocks);
        let from = request.arrival.as_nanos() as u64;
        let prompt = Costs::USUAL.of_step(u64::from(request.input_tokens), 0);
        let until = from + prompt + u64::from(request.output_tokens) * DECODE_NS;
        changes.extend([(from, blocks as i64), (until, -(blocks as i64))]);
    }
    // At equal times ends sort before arrivals.
    changes.sort_unstable();
    let (mut held, mut peak) = (0, 0);
    for (_, change) in changes {
        held += change;
        peak = peak.max(held);
    }
    largest.max((peak as u64 * SHARE_PERCENT).div_ceil(100) as usize)
}

/// Returns the same share of the blocks of `at_once` sessions of average length, each with its
/// longest request and without subagents; at least the blocks of the largest request.
pub fn blocks_for_sessions(requests: &[Request], at_once: usize, blocks_of: impl Fn(u64) -> usize) -> usize {
    let (mut sessions, mut largest): (HashMap<_, usize>, _) = (HashMap::new(), 1);
    for (index, request) in requests.iter().enumerate() {
        let blocks = blocks_of(request.tokens());
        largest = largest.max(blocks);
        if request.turn.is_none_or(|turn| turn.parent.is_none()) {
            let session = request.turn.map_or(Err(index), |turn| Ok(turn.session));
            let longest = sessions.entry(session).or_insert(1);
            *longest = (*longest).max(blocks);
        }
    }
    let all: u64 = sessions.values().map(|&blocks| blocks as u64).sum();
    let held = all.saturating_mul(at_once as u64) / sessions.len().max(1) as u64;
    largest.max((held.min(all).saturating_mul(SHARE_PERCENT)).div_ceil(100) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool::SessionId;
    use kvpool_load::Turn;
    use std::time::Duration;

    fn blocks(tokens: u64) -> usize {
        tokens.div_ceil(16) as usize
    }

    fn request(second: u64, input_tokens: u32) -> Request {
        Request::new(Duration::from_secs(second), input_tokens, 0)
    }

    #[test]
    fn the_largest_request_fits() {
        assert_eq!(blocks_for(&[], blocks), 1);
        assert_eq!(blocks_for(&[request(0, 1600), request(3600, 160)], blocks), 100);
    }

    #[test]
    fn sessions_have_the_blocks_of_an_average_one() {
        let turn = |session, tokens| {
            let turn = Turn { session: SessionId(session), parent: None, think: Duration::ZERO };
            Request { turn: Some(turn), ..request(0, tokens) }
        };
        let parent = Some(SessionId(0));
        let subagent = turn(3, 16).turn.map(|turn| Turn { parent, ..turn });
        let subagent = Request { turn: subagent, ..turn(3, 16) };
        let requests = [turn(0, 160), turn(0, 1600), turn(1, 3200), turn(2, 4800), subagent];
        let blocks_at = |at_once| blocks_for_sessions(&requests, at_once, blocks);
        assert_eq!([1, 2, 3, 9].map(blocks_at), [300, 300, 390, 390]);
        assert_eq!(blocks_for_sessions(&[], 4, blocks), 1);
    }

    #[test]
    fn the_busiest_moment_does_not_fit() {
        let together: Vec<Request> = (0..10).map(|_| request(5, 1600)).collect();
        assert_eq!(blocks_for(&together, blocks), 650);
    }
}
