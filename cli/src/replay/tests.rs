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
        hashed_tokens: 0,
    };
    Trace { name: "crowd".into(), requests: (0..requests).map(request).collect(), out_of_order: 0 }
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(trace: &Trace, blocks: usize, threads: usize, fault: Fault) -> Outcome {
    let memory = Ledger::new(SHAPE, blocks, fault);
    replay(&memory, SHAPE, trace, &Options::new(trace, threads), go_on)
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

/// A replay that completes or verifies nothing has not shown that anything holds.
#[test]
fn a_replay_of_nothing_is_not_sound() {
    let trace = crowd(50);
    for halt_at in [None, Some("40%".parse().unwrap())] {
        for verify in [true, false] {
            let options = Options { halt_at, verify, ..Options::new(&trace, 2) };
            let outcome = replay(&Ledger::new(SHAPE, 4, Fault::None), SHAPE, &trace, &options, go_on);
            assert!(!outcome.is_sound(50) && !outcome.is_intact(), "{outcome:?}");
            let found = &outcome.tally.findings[0];
            assert!(found.starts_with("nothing was replayed: every request was rejected"), "{found}");
            assert!(found.ends_with("the smallest needs 5 blocks and the pool had 4"), "{found}");
        }
    }
    let empty = Trace { requests: vec![], ..crowd(1) };
    let outcome = run(&empty, 60, 2, Fault::None);
    assert_eq!(outcome.tally.findings, ["nothing was replayed: no request was completed"]);
    assert!(!outcome.is_sound(0));
}

/// The outcome covers all that was done, and the threads read back what they hold.
#[test]
fn a_replay_is_interrupted() {
    let trace = crowd(20_000);
    for threads in [1, 3] {
        for caching in [false, true] {
            let memory = Ledger::new(SHAPE, 200, Fault::None);
            let memory = if caching { memory.caching() } else { memory };
            let mut breaks = 0;
            let outcome = replay(&memory, SHAPE, &trace, &Options::new(&trace, threads), |progress| {
                let is_enough = progress.settled > 0;
                breaks += u32::from(is_enough);
                if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert!(breaks > 0 && outcome.interrupted, "{outcome:?}");
            assert!(outcome.is_sound(20_000), "{outcome:?}");
            assert!(outcome.tally.completed > 0 && outcome.tally.completed < 20_000);
            assert_eq!(memory.free_blocks(), 200);
        }
    }
    // An interrupt before the first request is completed is neither a success nor a fault.
    let outcome = replay(
        &Ledger::new(SHAPE, 200, Fault::None),
        SHAPE,
        &trace,
        &Options { step_tokens: 1, ..Options::new(&trace, 1) },
        |_| ControlFlow::Break(()),
    );
    assert!(outcome.interrupted && outcome.is_intact(), "{outcome:?}");
    assert_eq!(outcome.is_sound(20_000), outcome.tally.completed > 0);
    // A replay that is complete is not interrupted.
    let outcome = replay(
        &Ledger::new(SHAPE, 200, Fault::None),
        SHAPE,
        &crowd(5),
        &Options::new(&trace, 1),
        |progress| if progress.settled == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) },
    );
    assert!(!outcome.interrupted && outcome.is_sound(5), "{outcome:?}");
}

#[test]
fn without_verification_nothing_is_read() {
    let trace = crowd(50);
    let options = Options { verify: false, ..Options::new(&trace, 2) };
    let outcome = replay(&Ledger::new(SHAPE, 60, Fault::None), SHAPE, &trace, &options, go_on);
    assert!(outcome.is_sound(50));
    assert_eq!(outcome.tally.tokens_verified, 0);
}

/// The checks check: each fault, once in a replay, is found.
#[test]
fn one_fault_anywhere_is_found() {
    let trace = crowd(100);
    for fault in [Fault::FlippedBit, Fault::DoubleOwner, Fault::LostStore, Fault::WrongFrame] {
        for threads in [1, 2] {
            for run in [run, run_caching] {
                let outcome = run(&trace, 60, threads, fault);
                assert!(!outcome.tally.corrupt.is_empty(), "{fault:?} went unnoticed: {outcome:?}");
                assert!(!outcome.is_sound(100));
            }
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

fn run_caching(trace: &Trace, blocks: usize, threads: usize, fault: Fault) -> Outcome {
    let memory = Ledger::new(SHAPE, blocks, fault).caching();
    replay(&memory, SHAPE, trace, &Options::new(trace, threads), go_on)
}

/// What is found of a prompt is neither written nor paid for, and read back like everything else.
#[test]
fn prefixes_are_found_again_and_verified() {
    let trace = Conversations::trace(3, 120);
    let blocks = 2 * blocks_for(&trace.requests, &SHAPE);
    let all: u64 = trace.requests.iter().map(Request::tokens).sum();
    for threads in [1, 2, 3] {
        let outcome = run_caching(&trace, blocks, threads, Fault::None);
        assert!(outcome.is_sound(120), "{outcome:?}");
        let tally = &outcome.tally;
        assert_eq!((tally.completed, tally.preempted), (120, 0));
        let full: u64 = trace.requests.iter().map(|request| u64::from(request.input_tokens / 16)).sum();
        assert_eq!((tally.lookup_blocks, tally.resumed_lookup_blocks), (full, 0));
        assert!(tally.hit_blocks > full / 4, "{} of {full}", tally.hit_blocks);
        assert_eq!(tally.tokens + 16 * tally.hit_blocks, all);
        assert!(tally.tokens_verified > all);
    }
}

/// Who gives way finds its own blocks again, and what others find of theirs is right.
#[test]
fn who_gave_way_finds_its_own_again() {
    let strangers = crowd(120);
    let mut friends = crowd(120);
    for (index, request) in (0..).zip(&mut friends.requests) {
        (request.hash_ids, request.hashed_tokens) = (vec![index % 5], request.input_tokens);
    }
    for (trace, is_shared) in [(strangers, false), (friends, true)] {
        for threads in [1, 2, 3] {
            let outcome = run_caching(&trace, 40, threads, Fault::None);
            assert!(outcome.is_sound(120), "{threads} threads: {:?}", outcome.tally.findings);
            let tally = &outcome.tally;
            assert!(tally.preempted > 0 && tally.resumed_lookup_blocks > 0);
            assert!(tally.resumed_hit_blocks <= tally.resumed_lookup_blocks);
            assert_eq!(tally.hit_blocks > 0, is_shared);
            // One thread comes back before others have taken all that it left.
            assert!(threads > 1 || tally.resumed_hit_blocks > 0);
        }
    }
}

/// A block of another prompt, and a cache that counts otherwise, are found out.
#[test]
fn a_wrong_hit_is_found() {
    let trace = Conversations::trace(3, 120);
    let blocks = blocks_for(&trace.requests, &SHAPE);
    for threads in [1, 2] {
        let outcome = run_caching(&trace, blocks, threads, Fault::FalseHit);
        assert!(!outcome.tally.corrupt.is_empty());
        let outcome = run_caching(&trace, blocks, threads, Fault::UncountedHit);
        assert!(outcome.tally.findings[0].starts_with("the cache says that it looked up"));
    }
}

fn options(trace: &Trace, threads: usize, schedule: &str) -> Options {
    Options { schedule: schedule.parse().unwrap(), ..Options::new(trace, threads) }
}

/// Growing is done at once; shrinking waits for what is in the way, and neither loses a block or a request.
#[test]
fn a_pool_changes_its_size_in_mid_replay() {
    let trace = crowd(400);
    for threads in [1, 3] {
        let memory = Ledger::with_max(SHAPE, 60, 90, Fault::None);
        let outcome = replay(&memory, SHAPE, &trace, &options(&trace, threads, "20%:90,60%:12"), go_on);
        assert!(outcome.is_sound(400), "{outcome:?}");
        let steps: Vec<_> =
            outcome.resizes.iter().map(|step| (step.from, step.to, step.outcome.clone())).collect();
        assert_eq!(steps, [(60, 90, ResizeOutcome::Done), (90, 12, ResizeOutcome::Done)]);
        assert!(outcome.resizes[0].at_request >= 80 && outcome.resizes[1].at_request >= 240);
        assert_eq!(memory.blocks(), 12);
    }
}

/// What fitted when it came and fits no more is rejected, whether it waits or runs, and nobody waits for it.
#[test]
fn a_pool_that_has_become_too_small_rejects() {
    let mut trace = crowd(200);
    for request in trace.requests.iter_mut().step_by(10) {
        request.input_tokens = 500;
    }
    for threads in [1, 2] {
        let memory = Ledger::new(SHAPE, 70, Fault::Shrinks);
        let outcome = replay(&memory, SHAPE, &trace, &Options::new(&trace, threads), go_on);
        assert!(outcome.is_sound(200), "{outcome:?}");
        assert_eq!(memory.blocks(), 20);
        assert!((1..=20).contains(&outcome.tally.rejected), "{outcome:?}");
    }
}

#[test]
fn what_goes_wrong_beside_the_threads_is_a_finding() {
    let trace = crowd(100);
    for (schedule, blocks_max, fault, finding) in [
        ("10%:90", 90, Fault::IdleResize, "a resize failed: 90 blocks were to be there, and 60 are"),
        ("10%:91", 90, Fault::None, "a resize failed: 91 blocks of 90 at most"),
        ("10%:61", 90, Fault::Compaction, "compaction: nothing moves"),
    ] {
        let memory = Ledger::with_max(SHAPE, 60, blocks_max, fault);
        let compaction = Compaction { threshold: 0.5, interval: Duration::from_millis(1) };
        let options = Options { compaction: Some(compaction), ..options(&trace, 2, schedule) };
        let outcome = replay(&memory, SHAPE, &trace, &options, go_on);
        assert_eq!(outcome.tally.findings, [finding]);
        assert!(!outcome.is_sound(100));
        assert_eq!(outcome.compaction.map(|totals| totals.runs), Some(1));
    }
}

/// At a share of the requests all stand still once, hold what they hold, and are done after that.
#[test]
fn a_replay_halts_to_be_looked_at() {
    let trace = crowd(300);
    for threads in [1, 2, 3] {
        let options = Options { halt_at: Some("40%".parse().unwrap()), ..Options::new(&trace, threads) };
        let memory = Ledger::new(SHAPE, 200, Fault::None);
        let mut looks = Vec::new();
        let outcome = replay(&memory, SHAPE, &trace, &options, |progress| {
            if progress.is_halted {
                looks.push((progress.settled, memory.free_blocks()));
                thread::sleep(Duration::from_millis(5));
                assert_eq!(memory.free_blocks(), looks[0].1, "nothing changes meanwhile");
            }
            ControlFlow::Continue(())
        });
        assert!(outcome.is_intact() && !outcome.is_sound(300), "{outcome:?}");
        assert_eq!(looks.len(), 1);
        let (settled, free) = looks[0];
        assert!((120..300).contains(&settled) && free < 200, "{looks:?}");
        assert_eq!(outcome.tally.completed, settled);
    }
}

/// A fault that only the last reading of a halted replay can see is seen.
#[test]
fn what_is_held_at_a_halt_is_read_back() {
    let trace = crowd(300);
    let options = Options { halt_at: Some("40%".parse().unwrap()), ..Options::new(&trace, 2) };
    let memory = Ledger::new(SHAPE, 200, Fault::None);
    let outcome = replay(&memory, SHAPE, &trace, &options, |progress| {
        if progress.is_halted {
            memory.damage();
        }
        ControlFlow::Continue(())
    });
    assert!(!outcome.tally.corrupt.is_empty() && !outcome.is_intact());
}
