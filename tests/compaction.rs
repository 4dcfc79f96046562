//! Moves while the pool serves: bytes are preserved whatever happens in between, and no block is
//! lost.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool::compact::{DefragConfig, DefragError, DefragOptions};
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocError, AllocRequest, BlockTable, Lease, Order, Pool, Priority, SequenceId};
use kvpool_testkit::leases::{block, checkerboard, handle, singles};
use kvpool_testkit::steps::append;

/// Longer than any wait in this file, on any machine.
const LIMIT: Duration = Duration::from_secs(60);

fn layout() -> KvLayout {
    KvLayout::named("tiny").expect("the layout of the examples")
}

fn pool(blocks: usize) -> Pool {
    Pool::builder(layout()).blocks(blocks).build().unwrap()
}

#[tokio::test]
async fn a_checkerboard_becomes_two_halves() {
    let pool = pool(1_000);
    let kept = checkerboard(&pool);
    assert!(pool.fragmentation().rate > 0.99);
    let report = pool.defragment().await.unwrap();
    assert!(report.fragmentation_before > 0.99, "{report:?}");
    assert!(report.fragmentation_after < 0.05, "{report:?}");
    assert!((200..=260).contains(&report.moved_blocks), "half of the blocks that are kept: {report:?}");
    assert_eq!(report.moved_bytes, (report.moved_blocks * pool.layout().bytes_per_block()) as u64);
    assert!(report.runs_gained >= 30, "{report:?}");
    pool.audit().unwrap();
    assert!(pool.defragment().await.unwrap().moved_blocks < 8, "there is little left to do");
    assert!(kept.iter().all(|lease| pool.info(handle(lease)).unwrap().sealed));
    drop(kept);
    assert_eq!((pool.audit().unwrap().owned, pool.free_blocks()), (0, 1_000));
    let all = pool.allocate(AllocRequest::new(1_000).contiguous());
    assert!(all.is_ok(), "every id is allocated, in any order: {all:?}");
}

#[tokio::test]
async fn invalid_options_are_refused() {
    let pool = pool(64);
    for options in [DefragOptions::new().wave_bytes(0), DefragOptions::new().order(Order(99))] {
        assert!(matches!(pool.defragment_with(options).await, Err(DefragError::Option { .. })));
    }
    for threshold in [-0.1, 1.1, f64::NAN] {
        let config = DefragConfig::new().threshold(threshold);
        assert!(matches!(pool.start_defragmenter(config), Err(DefragError::Option { .. })));
    }
    let still = DefragConfig::new().interval(Duration::ZERO);
    assert!(matches!(pool.start_defragmenter(still), Err(DefragError::Option { .. })));
    let bare = Pool::builder(layout()).blocks(64).without_storage().build().unwrap();
    assert_eq!(bare.defragment().await, Err(DefragError::NoBytes));
}

/// A copier that keeps its work until it is told to proceed.
#[derive(Default)]
struct Held(Mutex<Vec<(Vec<FrameMove>, CopyDone)>>);

impl Held {
    fn pool(self: &Arc<Self>, blocks: usize) -> Pool {
        let held = self.clone();
        let copier = Arc::new(move |moves: &[FrameMove], done: CopyDone| {
            held.0.lock().unwrap().push((moves.to_vec(), done));
        });
        Pool::builder(layout()).blocks(blocks).engine_copies(copier).build().unwrap()
    }

    fn take(&self) -> Option<(Vec<FrameMove>, CopyDone)> {
        self.0.lock().unwrap().pop()
    }
}

/// Moves that an earlier table misses are listed, and old frames stay readable until the batch
/// ends.
#[tokio::test]
async fn a_batch_learns_what_moved() {
    let pool = pool(400);
    let open = |id, tokens: usize| {
        let mut sequence = pool.sequence(SequenceId(id)).open().unwrap();
        append(&pool, &mut sequence, tokens);
        sequence
    };
    let (gone, kept, other) = (open(1, 40), open(2, 400), open(3, 300));
    drop((gone, other));
    let first = pool.begin_batch();
    let since = first.ticket();
    let mut table = BlockTable::new();
    first.block_table([&kept], &mut table).unwrap();
    first.finish();
    // All lower frames are free, and form one long run if the sequence's blocks go there.
    let report = pool.defragment_with(DefragOptions::new().order(Order(8))).await.unwrap();
    let second = pool.begin_batch();
    let mut moved = Vec::new();
    let all = second.moved_since(since, &mut moved);
    assert_eq!(all, kvpool::block::Since::Listed);
    assert_eq!(moved.len(), report.moved_blocks);
    let mut entries = Vec::new();
    assert_eq!(second.moved_entries([&kept], since, &mut entries), Ok(kvpool::block::Since::Listed));
    let mut by_entry = table.row(0).to_vec();
    entries.iter().for_each(|entry| by_entry[entry.column as usize] = entry.frame);
    let mut patched = table.row(0).to_vec();
    for (entry, block) in patched.iter_mut().zip(kept.blocks()) {
        if let Some(moved) = moved.iter().rev().find(|moved| moved.block == block) {
            *entry = moved.to.0 as i32;
        }
    }
    second.block_table([&kept], &mut table).unwrap();
    assert_eq!(patched, table.row(0));
    assert_eq!(by_entry, table.row(0));
    let none = second.moved_since(second.ticket(), &mut Vec::new());
    assert_eq!(none, kvpool::block::Since::Listed);
}

#[tokio::test]
async fn a_run_is_made_for_a_waiting_request() {
    let pool = pool(256);
    let kept = checkerboard(&pool);
    let refused = pool.allocate(AllocRequest::new(64).contiguous()).unwrap_err();
    assert!(matches!(refused, AllocError::NoRun { asked: 64, .. }), "{refused:?}");
    let request = AllocRequest::new(64).contiguous().priority(Priority::High);
    let lease = tokio::time::timeout(LIMIT, pool.allocate_async(request)).await.unwrap().unwrap();
    let first = pool.blocks().frame(lease.blocks()[0]);
    for (i, &block) in lease.blocks().iter().enumerate() {
        assert_eq!(pool.blocks().frame(block).0, first.0 + i as u32);
    }
    // Too few blocks are free: nothing is moved for it.
    let before = kept.iter().flat_map(Lease::frames).collect::<Vec<_>>();
    let request = AllocRequest::new(65).contiguous();
    let waits = tokio::time::timeout(Duration::from_millis(30), pool.allocate_async(request)).await;
    assert!(waits.is_err());
    assert_eq!(before, kept.iter().flat_map(Lease::frames).collect::<Vec<_>>());
    drop(lease);
    drop(kept);
    assert_eq!((pool.audit().unwrap().owned, pool.free_blocks()), (0, 256));
}

/// The event that makes a run possible may come after many failed turns, and be the last of all
/// events.
#[tokio::test]
async fn a_run_that_was_waited_for_long_is_still_granted() {
    let pool = pool(256);
    let mut kept = singles(&pool, AllocRequest::new(256));
    kept.retain(|lease| block(lease).0.is_multiple_of(2));
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(64).contiguous()).await });
    for _ in 0..200 {
        drop(pool.allocate(AllocRequest::new(1)).unwrap());
        tokio::time::sleep(Duration::from_micros(50)).await;
    }
    assert!(!waiting.is_finished(), "nothing is sealed, so that nothing can move");
    kept.iter_mut().for_each(|lease| lease.seal(..));
    let lease = tokio::time::timeout(LIMIT, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(lease.blocks().len(), 64);
    drop(lease);
    drop(kept);
    assert_eq!(pool.free_blocks(), 256);
}

/// A turn that came during another task's run belongs to the head, even if the head has changed.
#[tokio::test(start_paused = true)]
async fn a_resting_request_does_not_overtake_the_new_head() {
    let held = Arc::new(Held::default());
    let pool = held.pool(256);
    let mut kept = checkerboard(&pool);
    let mut other = Box::pin(pool.defragment_with(DefragOptions::new().wave_bytes(1)));
    assert!(poll(&mut other).is_pending(), "its wave of one block is being copied");
    let mut first = Box::pin(pool.allocate_async(AllocRequest::new(5).contiguous()).into_future());
    assert!(poll(&mut first).is_pending());
    drop(kept.remove(60));
    assert!(poll(&mut first).is_pending(), "it searched, and rests");
    let large = AllocRequest::new(200).priority(Priority::High);
    let mut urgent = Box::pin(pool.allocate_async(large).into_future());
    assert!(poll(&mut urgent).is_pending());
    kept.drain(60..63);
    assert!(poll(&mut urgent).is_pending(), "there is a run now, and not enough for this one");
    tokio::time::advance(Duration::from_millis(200)).await;
    assert!(poll(&mut first).is_pending(), "it is not its turn");
    drop(urgent);
    assert!(poll(&mut first).is_ready());
}

fn poll<F: Future>(future: &mut std::pin::Pin<Box<F>>) -> std::task::Poll<F::Output> {
    future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
}

/// A block becomes movable: nothing was freed, and yet the run can be allocated now.
#[tokio::test]
async fn a_block_that_becomes_movable_wakes_requests_for_runs() {
    let pool = pool(256);
    let mut kept = checkerboard(&pool);
    kept.iter_mut().for_each(|lease| assert!(lease.reopen(0)));
    let waits = |blocks| {
        let pool = pool.clone();
        tokio::spawn(async move { pool.allocate_async(AllocRequest::new(blocks).contiguous()).await })
    };
    let waiting = waits(32);
    tokio::time::sleep(Duration::from_millis(20)).await;
    kept.iter_mut().for_each(|lease| lease.seal(..));
    let first = tokio::time::timeout(LIMIT, waiting).await.expect("sealed blocks move").unwrap().unwrap();
    let pins: Vec<_> = kept.iter().map(|lease| pool.pin_scoped(handle(lease)).unwrap()).collect();
    let waiting = waits(64);
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(pins);
    let second = tokio::time::timeout(LIMIT, waiting).await.expect("unpinned blocks move").unwrap().unwrap();
    drop((first, second));
}

/// Another task's run takes any time; a request for a run takes frames that are freed meanwhile.
#[tokio::test]
async fn a_request_for_a_run_is_not_held_up_by_another_compaction() {
    let held = Arc::new(Held::default());
    let pool = held.pool(256);
    let kept = checkerboard(&pool);
    let one = pool.defragment_with(DefragOptions::new().wave_bytes(1));
    assert!(tokio::time::timeout(Duration::from_millis(20), one).await.is_err());
    let _never_done = held.take().expect("a wave is being copied");
    let other = pool.clone();
    let waiting =
        tokio::spawn(async move { other.allocate_async(AllocRequest::new(100).contiguous()).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(kept);
    let lease = tokio::time::timeout(LIMIT, waiting).await.expect("the run is free");
    assert_eq!(lease.unwrap().unwrap().runs().count(), 1);
}

#[tokio::test]
async fn a_task_that_waits_for_its_turn_can_be_stopped() {
    let held = Arc::new(Held::default());
    let pool = held.pool(256);
    let _kept = checkerboard(&pool);
    assert!(tokio::time::timeout(Duration::from_millis(20), pool.defragment()).await.is_err());
    let config = DefragConfig::new().interval(Duration::from_millis(1));
    let task = pool.start_defragmenter(config).unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let totals = tokio::time::timeout(LIMIT, task.stop()).await.expect("the task has no copy to finish");
    assert_eq!(totals.moved_blocks, 0);
}
