use super::ledger::{Fault, Ledger};
use super::*;
use crate::trace::Request;
use crate::workload::Conversations;

const SHAPE: Shape = Shape { layers: 2, k_bytes: 8, v_bytes: 8, block_tokens: 16 };

/// Requests that arrive all at once, into a pool that holds a few of them.
fn crowd(requests: u32) -> Trace {
    let request = |index: u32| Request {
        arrival: Duration::from_millis(u64::from(index)),
        input_tokens: 40 + 7 * (index % 11),
        output_tokens: 30 + index % 50,
        hash_ids: vec![],
    };
    Trace { name: "crowd".into(), requests: (0..requests).map(request).collect(), out_of_order: 0 }
}

fn run(trace: &Trace, blocks: usize, threads: usize, fault: Fault) -> Outcome {
    let memory = Ledger::new(SHAPE, blocks, fault);
    replay(&memory, SHAPE, trace, &Options::new(trace, threads), |_| {})
}

#[test]
fn every_request_is_completed_and_every_token_verified() {
    let trace = crowd(200);
    for threads in [1, 2, 3] {
        let outcome = run(&trace, 3000, threads, Fault::None);
        assert!(outcome.is_sound(200), "{outcome:?}");
        let tokens: u64 = trace.requests.iter().map(Request::tokens).sum();
        assert_eq!((outcome.tally.completed, outcome.tally.tokens), (200, tokens));
        assert!(outcome.tally.tokens_verified > tokens, "all at the end, and the last of each step");
        assert_eq!(outcome.first_refusal, None);
    }
}

/// Threads that drive each other out of a pool for one or two requests still come to an end.
#[test]
fn a_pool_that_is_far_too_small_is_shared_out() {
    let trace = crowd(120);
    for blocks in [12, 13, 20, 40] {
        for threads in [1, 2, 3] {
            let outcome = run(&trace, blocks, threads, Fault::None);
            assert!(outcome.is_sound(120), "{blocks} blocks, {threads} threads: {outcome:?}");
            assert_eq!(outcome.tally.completed, 120);
        }
    }
    let outcome = run(&trace, 40, 2, Fault::None);
    assert!(outcome.tally.preempted > 0);
    let (used, owned) = outcome.first_refusal.unwrap();
    assert!(used > 0.8 && owned <= used);
}

#[test]
fn what_can_never_fit_is_rejected() {
    let mut trace = crowd(50);
    trace.requests[20].input_tokens = 10_000;
    let outcome = run(&trace, 60, 2, Fault::None);
    assert!(outcome.is_sound(50));
    assert_eq!((outcome.tally.completed, outcome.tally.rejected), (49, 1));
}

#[test]
fn without_verification_nothing_is_read() {
    let trace = crowd(50);
    let options = Options { verify: false, ..Options::new(&trace, 2) };
    let outcome = replay(&Ledger::new(SHAPE, 60, Fault::None), SHAPE, &trace, &options, |_| {});
    assert!(outcome.is_sound(50));
    assert_eq!(outcome.tally.tokens_verified, 0);
}

/// The checks check: each fault, once in a replay, is found.
#[test]
fn one_fault_anywhere_is_found() {
    let trace = crowd(100);
    for fault in [Fault::FlippedBit, Fault::DoubleOwner, Fault::LostStore, Fault::WrongFrame] {
        for threads in [1, 2] {
            let outcome = run(&trace, 60, threads, fault);
            assert!(!outcome.tally.corrupt.is_empty(), "{fault:?} went unnoticed: {outcome:?}");
            assert!(!outcome.is_sound(100));
        }
    }
    let outcome = run(&trace, 60, 2, Fault::Leak);
    assert_eq!((outcome.blocks_leaked, outcome.audit.is_err()), (1, true));
    assert!(!outcome.is_sound(100));
}

/// The others do not wait for ever for what a dead thread holds.
#[test]
fn a_thread_that_panics_is_a_finding() {
    for threads in [1, 3] {
        let outcome = run(&crowd(100), 60, threads, Fault::Panic);
        assert_eq!(outcome.tally.findings[0], "a scheduler thread panicked: ordered");
        assert!(!outcome.is_sound(100));
    }
}

/// One thread decides nothing by chance.
#[test]
fn one_thread_is_deterministic() {
    let trace = Conversations::trace(3, 120);
    let blocks = blocks_for(&trace.requests, &SHAPE) / 2;
    let counts = || {
        let tally = run(&trace, blocks, 1, Fault::None).tally;
        (tally.tokens, tally.tokens_verified, tally.preempted, tally.blocks_allocated, tally.runs)
    };
    let first = counts();
    assert!(first.2 > 0, "half of the derived size lets nobody give way");
    assert_eq!(first, counts());
}
