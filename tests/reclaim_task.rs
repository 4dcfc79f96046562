//! The background task and reclaim ahead of need: it does what the ends of batches left.
#![cfg(not(any(kvpool_loom, miri)))]

use std::time::Duration;

use kvpool::compact::DefragConfig;
use kvpool::prefix::PrefixConfig;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Batch, Pool, Sequence, SequenceId};
use tokio::time::sleep;

const BLOCKS: usize = 32_768;

/// The watermark of a pool of this size, more than one slice evicts.
const WATERMARK: usize = 256;
const SLICE: usize = 128;

/// Blocks outside of whole units: beside the null block, and in the last frame.
const HOLES: usize = 64;

const INTERVAL: Duration = Duration::from_millis(2);

fn pool() -> Pool {
    // Without a tolerance, a slice evicts no unit beside those that it completes.
    tolerant(0.0)
}

fn tolerant(tolerance: f64) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(1);
    let layout = layout.dtype(Dtype::F32).build().unwrap();
    let cache = PrefixConfig::new().tolerance(tolerance);
    Pool::builder(layout).blocks(BLOCKS).prefix_cache(cache).build().unwrap()
}

fn start(pool: &Pool) -> kvpool::compact::Defragmenter {
    pool.start_defragmenter(DefragConfig::new().interval(INTERVAL)).unwrap()
}

/// Opens a sequence of blocks that no other sequence has, within `batch`.
fn open(pool: &Pool, batch: &mut Batch, id: u64, blocks: usize) -> Sequence {
    let tokens: Vec<u32> = (0..blocks as u32).map(|token| token | (id as u32) << 20).collect();
    let mut sequence = pool.sequence(SequenceId(id)).tokens(&tokens).unwrap();
    batch.append(&mut sequence, blocks).unwrap();
    sequence
}

/// Fills half of the pool with evictable blocks, and then the other half: one slice is evicted at
/// the end of that batch, and more are owed.
fn fill(pool: &Pool) -> Sequence {
    let kept = fill_with(pool);
    assert_eq!((evicted(pool), pool.stats().free), (SLICE, SLICE + HOLES));
    kept
}

fn fill_with(pool: &Pool) -> Sequence {
    let mut batch = pool.begin_batch();
    let gone = open(pool, &mut batch, 1, BLOCKS / 2);
    batch.finish();
    drop(gone);
    assert_eq!((evicted(pool), pool.stats().evictable), (0, BLOCKS / 2));
    let mut batch = pool.begin_batch();
    let kept = open(pool, &mut batch, 2, BLOCKS / 2 - HOLES);
    batch.finish();
    kept
}

fn evicted(pool: &Pool) -> usize {
    pool.prefix_cache().unwrap().stats().evicted_blocks as usize
}

/// The last batch has done one slice, and no other begins.
#[tokio::test(start_paused = true)]
async fn a_pool_whose_engine_is_idle_is_restored() {
    let pool = pool();
    let kept = fill(&pool);
    sleep(100 * INTERVAL).await;
    assert_eq!(evicted(&pool), SLICE, "without a task");
    let task = start(&pool);
    sleep(100 * INTERVAL).await;
    assert_eq!((evicted(&pool), pool.stats().free), (WATERMARK, WATERMARK + HOLES));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(evicted(&pool), WATERMARK, "and no more than that");
    let _ = task.stop().await;
    drop(kept);
    pool.audit().unwrap();
}

/// While batches begin, their ends do the work; during a long one, the task.
#[tokio::test(start_paused = true)]
async fn a_task_leaves_the_work_to_batches() {
    let pool = pool();
    let kept = fill(&pool);
    let task = start(&pool);
    let mut batches = Vec::new();
    for _ in 0..50 {
        batches.push(pool.begin_batch());
        sleep(INTERVAL / 2).await;
    }
    assert_eq!(evicted(&pool), SLICE, "no batch has ended, and a new one began before each check");
    sleep(3 * INTERVAL).await;
    assert_eq!(evicted(&pool), WATERMARK, "the step is long");
    batches.into_iter().for_each(Batch::finish);
    let _ = task.stop().await;
    drop(kept);
    pool.audit().unwrap();
}

/// A batch in flight sees all evictable blocks: the work is done after it, by the task too.
#[tokio::test(start_paused = true)]
async fn what_a_batch_sees_is_evicted_later() {
    let pool = pool();
    let mut batch = pool.begin_batch();
    let gone = open(&pool, &mut batch, 1, BLOCKS / 2);
    batch.finish();
    let other = pool.begin_batch();
    drop(gone);
    let mut batch = pool.begin_batch();
    let kept = open(&pool, &mut batch, 2, BLOCKS / 2 - HOLES);
    batch.finish();
    let task = start(&pool);
    sleep(100 * INTERVAL).await;
    assert_eq!((evicted(&pool), pool.stats().evictable), (0, BLOCKS / 2));
    // Its end does one slice, the task the rest.
    other.finish();
    assert_eq!(evicted(&pool), SLICE);
    sleep(200 * INTERVAL).await;
    assert_eq!((evicted(&pool), pool.stats().free), (WATERMARK, WATERMARK + HOLES));
    let _ = task.stop().await;
    drop(kept);
    pool.audit().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stopped_task_evicts_nothing() {
    let pool = pool();
    let task = start(&pool);
    let _ = task.stop().await;
    let _kept = fill(&pool);
    sleep(100 * INTERVAL).await;
    assert_eq!(evicted(&pool), SLICE);
}

/// The units beside those that a slice completes follow as a whole, four in each direction, if no
/// block in them has an owner and the tolerance permits it.
#[test]
fn units_beside_a_completed_one_follow() {
    for (tolerance, beside) in [(0.0, 0), (0.000_01, 0), (0.05, 4), (1.0, 4)] {
        let pool = tolerant(tolerance);
        let kept = fill_with(&pool);
        // Above the slice's units are those of the other sequence.
        assert_eq!(evicted(&pool), SLICE + beside * 64, "at a tolerance of {tolerance}");
        let runs = pool.fragmentation();
        assert_eq!(runs.longest_run, SLICE + beside * 64, "{runs:?}");
        drop(kept);
        pool.audit().unwrap();
    }
}

/// They end where a block has an owner.
#[test]
fn an_owner_in_a_unit_keeps_it() {
    const HELD: usize = BLOCKS / 2 - 4 * 64;
    let pool = tolerant(0.05);
    let mut batch = pool.begin_batch();
    let gone = open(&pool, &mut batch, 1, BLOCKS / 2);
    batch.finish();
    drop(gone);
    // The frames of one sequence: all but the last four units, but for the rest of the first unit.
    let tokens: Vec<u32> = (0..=HELD as u32).map(|token| token | 1 << 20).collect();
    let held = pool.sequence(SequenceId(3)).tokens(&tokens).unwrap();
    assert_eq!(held.len(), HELD);
    let mut batch = pool.begin_batch();
    let kept = open(&pool, &mut batch, 2, BLOCKS / 2 - HOLES);
    batch.finish();
    assert_eq!(evicted(&pool), 4 * 64, "two by the slice, and two beside");
    drop((held, kept));
    pool.audit().unwrap();
}
