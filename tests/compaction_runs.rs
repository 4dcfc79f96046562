//! What compaction leaves of the runs of sequences, and of evictable blocks.

use std::time::Duration;

use kvpool::compact::{DefragConfig, DefragOptions, FrameKind};
use kvpool::storage::KvLayout;
use kvpool::{CompactionState, Order, Pool, Sequence, SequenceId};
use kvpool_testkit::leases::{checkerboard, handle};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool as cached_pool, prompt};
use kvpool_testkit::steps;

fn pool(blocks: usize) -> Pool {
    let layout = KvLayout::named("tiny").expect("the layout of the examples");
    Pool::builder(layout).blocks(blocks).build().unwrap()
}

fn append(pool: &Pool, sequence: &mut Sequence, blocks: usize) {
    steps::append(pool, sequence, blocks * BLOCK_TOKENS);
}

/// Opens, grows and closes sequences in turn, until about 60 % of the pool is in use.
fn churned(pool: &Pool, rng: &mut fastrand::Rng) -> Vec<Sequence> {
    let mut open: Vec<Sequence> = Vec::new();
    for id in 0..600 {
        let mut sequence = pool.sequence(SequenceId(id)).open().unwrap();
        append(pool, &mut sequence, rng.usize(1..160));
        open.push(sequence);
        for _ in 0..4 {
            let grown = rng.usize(..open.len());
            append(pool, &mut open[grown], rng.usize(1..5));
        }
        while pool.free_blocks() < pool.total_blocks() * 2 / 5 {
            open.swap_remove(rng.usize(..open.len()));
        }
    }
    open
}

#[tokio::test]
async fn a_defragmentation_does_not_shorten_the_runs_of_sequences() {
    let (mut moved, mut gained) = (0, 0);
    for seed in 0..12 {
        let (pool, rng) = (pool(8_000), &mut fastrand::Rng::with_seed(seed));
        let open = churned(&pool, rng);
        let before = pool.snapshot();
        let report = pool.defragment().await.unwrap();
        let after = pool.snapshot();
        let (was, is) = (before.mean_sequence_run(), after.mean_sequence_run());
        assert!(is >= 0.98 * was, "seed {seed}: {was} -> {is}, {report:?}");
        assert!(after.free_runs(Order(4)) >= before.free_runs(Order(4)), "seed {seed}: {report:?}");
        moved += report.moved_blocks;

        // A price of 0 gains free runs at any cost.
        let report = pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)).await.unwrap();
        gained += report.runs_gained;
        drop(open);
        assert_eq!(pool.audit().unwrap().owned, 0);
    }
    assert!(moved > 0, "no pool had a move that pays");
    assert!(gained > 20, "{gained} runs were left for a price of 0");
}

#[tokio::test]
async fn unsealed_and_pinned_blocks_are_counted() {
    let pool = pool(256);
    let mut kept = checkerboard(&pool);
    kept[100..].iter_mut().for_each(|lease| assert!(lease.reopen(0)));
    let pin = pool.pin_scoped(handle(&kept[0])).unwrap();
    let report = pool.defragment().await.unwrap();
    assert_eq!(report.fixed_blocks, 29, "28 unsealed, 1 pinned: {report:?}");
    drop(pin);
}

#[test]
fn reserved_and_evictable_frames_are_reported() {
    let pool = cached_pool(1_500);
    let (mut sequence, _) = admit(&pool, 0, &prompt(1, 4 * 100));
    steps::append(&pool, &mut sequence, &prompt(9, 4));
    drop(admit(&pool, 1, &prompt(2, 4 * 90)));
    pool.trim();
    let (snapshot, order) = (pool.snapshot(), pool.snapshot().order());
    // A whole unit, and the first one up to the null block: it had 63 free frames for the last 37.
    let of = |kind| snapshot.count(kind);
    assert_eq!((of(FrameKind::Evictable), of(FrameKind::ReservedForGrowth)), (90, 26));
    let figures = pool.fragmentation();
    assert_eq!((figures.reserved_for_growth, pool.stats().free), (26, pool.free_blocks()));
    assert_eq!(figures.rate, snapshot.fragmentation(order));
    assert_eq!(pool.available_fragmentation(), snapshot.available_fragmentation(order));
    drop(sequence);
    assert_eq!(pool.fragmentation().reserved_for_growth, 0);
}

/// A pool full of evictable blocks has few free frames, and nothing to compact, although a few open
/// sequences lie among them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_background_task_rests_in_a_pool_full_of_evictable_blocks() {
    let pool = cached_pool(4_096);
    let mut open = Vec::new();
    for first in 0..60 {
        let (sequence, _) = admit(&pool, u64::from(first), &prompt(first, 4 * 100));
        open.extend((first % 10 == 0).then_some(sequence));
    }
    let stats = pool.stats();
    assert!(stats.evictable > stats.free && stats.used > 500, "{stats:?}");
    let task = pool.start_defragmenter(DefragConfig::new().interval(Duration::from_millis(1))).unwrap();
    for first in 60..120 {
        drop(admit(&pool, u64::from(first), &prompt(first, 4 * 100)));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let state = pool.compaction_state();
    let totals = task.stop().await;
    assert!(totals.looks > 0 && totals.failed == 0, "{totals:?}");
    assert_eq!((totals.moved_blocks, state), (0, Some(CompactionState::Contiguous)), "{totals:?}");
    drop(open);
    assert_eq!(pool.audit().unwrap().owned, 0);
}

/// A pool full of prompts of 4 blocks, one in four of them open.
fn scattered() -> (Pool, Vec<Sequence>) {
    let pool = cached_pool(1_023);
    let mut open = Vec::new();
    for number in 0..1_023 / 4 {
        open.push(admit(&pool, u64::from(number), &prompt(number, 4 * BLOCK_TOKENS)).0);
    }
    let mut rng = fastrand::Rng::with_seed(7);
    open.retain(|_| rng.u8(..4) == 0);
    (pool, open)
}

/// Only owned blocks are copied; cached ones give way.
#[tokio::test]
async fn evictable_blocks_are_dropped_instead_of_copied() {
    let (pool, open) = scattered();
    let (before, owned) = (pool.stats(), pool.stats().used);
    let report = pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)).await.unwrap();
    let after = pool.stats();
    assert!(report.moved_blocks > 50 && report.moved_blocks <= owned, "{report:?}");
    assert!(report.dropped_blocks > 0 && report.dropped_blocks <= report.moved_blocks, "{report:?}");
    assert_eq!(after.evictable, before.evictable - report.dropped_blocks, "{report:?}");
    assert!(report.available_fragmentation_after < report.available_fragmentation_before / 2.0, "{report:?}");
    assert!(!report.is_worse() && report.runs_gained > 0, "{report:?}");
    assert_eq!(pool.metrics().moves.dropped_blocks as usize, report.dropped_blocks);
    // A second one finds little to do.
    let again = pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)).await.unwrap();
    assert!(again.moved_blocks == 0, "{report:?} {again:?}");
    drop(open);
    pool.audit().unwrap();
}

/// A batch in flight that may see an evictable block keeps it in its frame.
#[tokio::test]
async fn a_block_that_a_batch_may_see_is_not_dropped() {
    let pool = cached_pool(1_023);
    let batch = pool.begin_batch();
    let mut open = Vec::new();
    for number in 0..1_023 / 4 {
        open.push(admit(&pool, u64::from(number), &prompt(number, 4 * BLOCK_TOKENS)).0);
    }
    open.retain(|sequence| sequence.id().0 % 4 == 0);
    let before = pool.stats();
    let report = pool.defragment().await.unwrap();
    assert_eq!((report.dropped_blocks, pool.stats().evictable), (0, before.evictable), "{report:?}");
    assert_eq!(report.given_up.total(), 0, "and is no destination of a plan: {report:?}");
    batch.finish();
    assert!(pool.defragment().await.unwrap().dropped_blocks > 0);
    drop(open);
    pool.audit().unwrap();
}

/// While blocks are evictable, the task moves its share, says so, and goes on as blocks are
/// allocated.
#[tokio::test(start_paused = true)]
async fn the_background_task_keeps_to_its_share_and_says_why_it_rests() {
    let (pool, open) = scattered();
    assert_eq!(pool.compaction_state(), None);
    let config = DefragConfig::new().moves(DefragOptions::new().fragmentation_penalty(0)).share(0.0);
    let task = pool.start_defragmenter(config).unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(pool.compaction_state(), Some(CompactionState::Share));
    assert_eq!(task.stop().await.moved_blocks, 0);
    assert_eq!(pool.compaction_state(), None, "the task has ended");

    let task = pool.start_defragmenter(config.share(0.02)).unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let advance = task.totals();
    assert!((1..=1_023 / 64).contains(&advance.moved_blocks), "{advance:?}");
    assert_eq!(pool.compaction_state(), Some(CompactionState::Share));
    for number in 1_000..1_050 {
        drop(admit(&pool, u64::from(number), &prompt(number, 4 * BLOCK_TOKENS)));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let more = task.stop().await;
    assert_eq!(more.moved_blocks, advance.moved_blocks, "4 moves would gain nothing: {more:?}");

    let task = pool.start_defragmenter(config.share(1.0)).unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let advance = task.totals().moved_blocks;
    assert!(advance <= 1_023 / 64, "{advance} moved before any was allocated");
    for number in 2_000..2_100 {
        drop(admit(&pool, u64::from(number), &prompt(number, 4 * BLOCK_TOKENS)));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let state = pool.compaction_state();
    assert!(matches!(state, Some(CompactionState::Contiguous | CompactionState::NoGain)), "{state:?}");
    assert!(task.stop().await.moved_blocks > advance, "it goes on as blocks are allocated");
    let wrong = pool.start_defragmenter(config.share(1.5)).unwrap_err();
    assert!(wrong.to_string().contains("share"), "{wrong}");
    drop(open);
    pool.audit().unwrap();
}
