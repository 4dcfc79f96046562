//! The budget of pins: each block counts once, for whomever it was pinned last.

use super::*;

/// A pool of 60 blocks with 10 pinned at a time.
fn bench() -> Bench {
    let bytes = Bench::new(60, HintLimits::new()).block_bytes();
    Bench::new(60, HintLimits::new().pinned_bytes(10 * bytes))
}

fn hashes(bench: &Bench, number: u32, blocks: usize) -> Vec<kvpool::prefix::BlockHash> {
    let cache = bench.pool.prefix_cache().unwrap();
    cache.hashes(&PrefixKeys::new(), &prompt(number, blocks * BLOCK_TOKENS)).unwrap()
}

fn is_full(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Rejected { reason: Rejection::Pinned { .. } })
}

/// Returns how many blocks of the first three prompts are left when so many were evicted.
fn left(bench: &Bench, evicted: usize) -> [usize; 3] {
    bench.evict(evicted);
    [1, 2, 3].map(|number| bench.cached(number))
}

#[test]
fn a_list_with_the_same_end_pins_no_more() {
    let bench = bench();
    (1..=3).for_each(|number| bench.run(number, 10));
    let (one, other) = (hashes(&bench, 1, 10), hashes(&bench, 2, 9));
    let list = |hashes: &[_]| Target::Hashes(hashes.to_vec());
    assert_eq!(bench.hint(list(&one), pin(9_000)), Outcome::Accepted { blocks: 10 });
    let mixed = [&other[..], &one[9..]].concat();
    let outcome = bench.hint(list(&mixed), pin(9_000));
    assert!(is_full(&outcome), "{outcome:?}");
    assert_eq!(bench.hint(list(&one[9..]), pin(9_500)), Outcome::Accepted { blocks: 1 });
    bench.retain(3, 90_000);
    assert_eq!(left(&bench, 20), [10, 0, 0]);
}

#[test]
fn a_later_sequence_of_the_same_id_pins_no_more() {
    let bench = bench();
    let all = || Target::Tokens(SequenceId(7), 0..usize::MAX);
    let open = bench.open(7, 1, 10);
    assert_eq!(bench.hint(all(), pin(9_000)), Outcome::Deferred { blocks: 10 });
    assert_eq!(bench.hint(all(), pin(9_000)), Outcome::Deferred { blocks: 10 }, "in place of itself");
    let other = bench.open(8, 2, 10);
    let outcome = bench.hint(Target::Tokens(SequenceId(8), 0..usize::MAX), pin(9_000));
    assert!(is_full(&outcome), "before the first is closed: {outcome:?}");
    drop((open, other));
    let open = bench.open(7, 3, 10);
    let outcome = bench.hint(all(), pin(9_000));
    assert!(is_full(&outcome), "after: {outcome:?}");
    drop(open);
    assert_eq!(left(&bench, 20), [10, 0, 0]);
}

#[test]
fn blocks_that_two_hints_pin_count_once() {
    let bench = bench();
    (1..=2).for_each(|number| bench.run(number, 5));
    assert_eq!(bench.session(1, pin(9_000)), Outcome::Accepted { blocks: 5 });
    let list = Target::Hashes(hashes(&bench, 1, 5));
    assert_eq!(bench.hint(list.clone(), pin(9_000)), Outcome::Accepted { blocks: 5 });
    assert_eq!(bench.session(2, pin(9_000)), Outcome::Accepted { blocks: 5 });
    // Of a session that is forgotten, too.
    bench.session(1, Action::Release);
    bench.run(1, 5);
    assert_eq!(bench.session(1, pin(9_000)), Outcome::Accepted { blocks: 5 });
    assert_eq!(bench.hint(list, retain(CachePriority::Low, 9_000)), Outcome::Accepted { blocks: 5 });
    bench.run(3, 5);
    assert_eq!(bench.session(3, pin(9_000)), Outcome::Accepted { blocks: 5 }, "in the place of the first");
    assert_eq!(left(&bench, 5), [0, 5, 5]);
}

#[test]
fn evicted_blocks_and_ended_times_give_room() {
    let bench = bench();
    bench.run(1, 10);
    bench.session(1, pin(90_000));
    drop(bench.pool.allocate(AllocRequest::new(56)).unwrap());
    bench.run(2, 10);
    let clipped = Outcome::Clipped { blocks: 6, until: Millis(9_000), limit: Limit::PinnedBytes };
    assert_eq!(bench.session(2, pin(9_000)), clipped);
    bench.time.store(9_000, Relaxed);
    bench.run(3, 6);
    assert_eq!(bench.session(3, pin(9_500)), Outcome::Accepted { blocks: 6 });
    assert_eq!(left(&bench, 10), [4, 0, 6]);
}

/// A pin is for every group of layers, or the blocks of the others are of no use.
#[test]
fn a_small_budget_is_shared_by_the_groups() {
    let layout = KvLayout::named("tiny").unwrap();
    let bytes = layout.bytes_per_block() as u64;
    let builder = Pool::builder(layout).blocks(100).threads(1).without_storage();
    let builder = builder.prefix_cache(PrefixConfig::new()).groups([None, None]);
    let pool = builder.hints(HintLimits::new().pinned_bytes(10 * bytes)).build().unwrap();
    let tokens = prompt(1, 33);
    let mut sequence =
        pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &tokens).session(SessionId(1))).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(33)).unwrap();
    batch.finish();
    drop(sequence);
    let until = Millis(pool.prefix_cache().unwrap().now().0 + 60_000);
    for _ in 0..2 {
        let outcome = pool.hint(&Hint::new(target(1), Action::Pin { until }));
        assert_eq!(outcome, Outcome::Clipped { blocks: 10, until, limit: Limit::PinnedBytes });
    }
    pool.audit().unwrap();
    // What is left of each group is the beginning of the prompt.
    drop(pool.allocate(AllocRequest::new(88)).unwrap());
    let request = AdmitRequest::new(SequenceId(2), &tokens);
    assert_eq!(pool.admit_grouped(&request).unwrap().len(), 5 * 4);
}
