//! A pool size for a trace: enough blocks to serve it, few enough that the pool is full at times.

use kvpool_load::Request;

use super::shared_clock::step_ns;

/// The size in percent of the blocks at the busiest moment. Then a third of the requests waits or
/// is preempted, but most of the time none is.
const SHARE_PERCENT: u64 = 65;

/// Mean nanoseconds between tokens: a decoding step, and the prompts in between.
const DECODE_NS: u64 = 20_000_000;

/// Returns a fixed share of the blocks in use at the busiest moment, if each request had all of its
/// blocks from arrival to end; at least the blocks of the largest request. `blocks_of` returns those
/// of a number of tokens.
pub fn blocks_for(requests: &[Request], blocks_of: impl Fn(u64) -> usize) -> usize {
    let mut changes: Vec<(u64, i64)> = Vec::with_capacity(2 * requests.len());
    let mut largest = 1;
    for request in requests {
        let blocks = blocks_of(request.tokens());
        largest = largest.max(blocks);
        let from = request.arrival.as_nanos() as u64;
        let prompt = step_ns(u64::from(request.input_tokens), 0);
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

#[cfg(test)]
mod tests {
    use super::*;
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
    fn the_busiest_moment_does_not_fit() {
        let together: Vec<Request> = (0..10).map(|_| request(5, 1600)).collect();
        assert_eq!(blocks_for(&together, blocks), 650);
    }
}
