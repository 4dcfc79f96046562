//! Futures on executors other than tokio: each waits on threads that poll nothing else. Deadlines
//! pass and are met, dropped futures pass their turn on, and compaction, resizes and migrations end.
#![cfg(not(kvpool_loom))]

use std::pin::{Pin, pin};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragError, DefragOptions, ResizeError, ResizeOptions};
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Lease, Pool, PoolBuilder, Preempt, SequenceError, SequenceId,
    SettleError, TransferError,
};
use kvpool_testkit::leases::checkerboard;
use kvpool_testkit::threads;
use pollster::block_on;

/// A deadline that passes.
const SHORT: Duration = Duration::from_millis(30);

/// Longer than any wait in this file, on any machine.
const LIMIT: Duration = Duration::from_secs(30);

fn builder(blocks: usize) -> PoolBuilder {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks)
}

fn pool(blocks: usize) -> Pool {
    builder(blocks).build().unwrap()
}

fn all(pool: &Pool) -> Lease<'static> {
    pool.allocate_owned(AllocRequest::new(pool.free_blocks())).unwrap()
}

fn far() -> Instant {
    Instant::now() + LIMIT
}

/// Runs a wait until a deadline that passes, and checks when it ended.
fn late<T>(wait: impl FnOnce(Instant) -> T) -> T {
    let deadline = Instant::now() + SHORT;
    let outcome = wait(deadline);
    assert!(Instant::now() >= deadline, "it gave up early");
    assert!(deadline.elapsed() < LIMIT / 2, "it gave up {:?} late", deadline.elapsed());
    outcome
}

fn poll_once<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Waits until this number of requests is in the queue.
fn in_line(pool: &Pool, count: usize) {
    let limit = far();
    while pool.stats().waiting != count {
        assert!(Instant::now() < limit, "{} requests in the queue", pool.stats().waiting);
        thread::yield_now();
    }
}

#[test]
fn allocations_end_at_their_deadlines_on_every_thread() {
    let pool = pool(8);
    let held = all(&pool);
    threads::scope(|scope| {
        for blocks in 1..=4 {
            let pool = &pool;
            scope.spawn(move || {
                let request = AllocRequest::new(blocks);
                let refused = late(|deadline| block_on(pool.allocate_async(request).until(deadline)));
                let Err(AllocError::Deadline { asked, free: 0, .. }) = refused else { panic!("{refused:?}") };
                assert_eq!(asked, blocks);
            });
        }
    });
    assert_eq!(pool.stats().waiting, 0);
    threads::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let lease = block_on(pool.allocate_async(AllocRequest::new(2)).until(far())).unwrap();
                assert_eq!(lease.blocks().len(), 2);
            });
        }
        in_line(&pool, 4);
        drop(held);
    });
    assert_eq!((pool.audit().unwrap().owned, pool.stats().waiting), (0, 0));
}

#[test]
fn a_dropped_future_passes_its_turn_on() {
    let pool = pool(8);
    let held = all(&pool);
    let mut first = Box::pin(pool.allocate_async(AllocRequest::new(8)).until(far()));
    assert!(poll_once(first.as_mut()).is_pending());
    threads::scope(|scope| {
        let second = scope.spawn(|| block_on(pool.allocate_async(AllocRequest::new(8)).until(far())));
        in_line(&pool, 2);
        // The first is woken, and not polled.
        drop(held);
        drop(first);
        assert_eq!(second.join().unwrap().unwrap().blocks().len(), 8);
    });
    assert_eq!((pool.free_blocks(), pool.stats().waiting), (8, 0));
}

/// The blocks are moved until there is a run; between two attempts the request rests.
#[test]
fn a_run_is_made_for_a_waiting_request() {
    let pool = pool(256);
    let kept = checkerboard(&pool);
    // Frames that a batch in flight may see are not free before it ends.
    let batch = pool.begin_batch();
    let request = AllocRequest::new(100).contiguous();
    threads::scope(|scope| {
        let waiting = scope.spawn(|| block_on(pool.allocate_async(request).until(far())));
        in_line(&pool, 1);
        thread::sleep(SHORT);
        batch.finish();
        assert_eq!(waiting.join().unwrap().unwrap().runs().count(), 1);
    });
    drop(kept);
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn admissions_and_reservations_wait() {
    let pool = pool(20);
    let mut running = pool.admit(&AdmitRequest::new(SequenceId(1), &[1; 8])).unwrap();
    let rest = all(&pool);
    let prompt = [2; 40];
    let request = AdmitRequest::new(SequenceId(2), &prompt);
    let refused = late(|deadline| block_on(pool.admit_async(&request).until(deadline)));
    assert!(
        matches!(refused, Err(SequenceError::Alloc(AllocError::Deadline { asked: 10, .. }))),
        "{refused:?}"
    );
    let refused = late(|deadline| block_on(pool.reserve_async(&mut running, 20).until(deadline)));
    assert!(
        matches!(refused, Err(SequenceError::Alloc(AllocError::Deadline { asked: 3, .. }))),
        "{refused:?}"
    );
    assert_eq!((pool.sequence_count(), running.reserved_blocks()), (1, 2));
    threads::scope(|scope| {
        let admitted = scope.spawn(|| block_on(pool.admit_async(&request).until(far())).unwrap());
        scope.spawn(|| block_on(pool.reserve_async(&mut running, 20).until(far())).unwrap());
        in_line(&pool, 2);
        drop(rest);
        assert_eq!(admitted.join().unwrap().reserved_blocks(), 10);
    });
    assert_eq!(running.reserved_blocks(), 5);
    // A dropped admission leaves neither the queue nor its id taken.
    let rest = all(&pool);
    {
        let mut waiting = pin!(pool.admit_async(&request).into_future());
        assert!(poll_once(waiting.as_mut()).is_pending());
        assert_eq!((pool.stats().waiting, pool.sequence_count()), (1, 2));
    }
    drop((rest, running));
    assert_eq!((pool.stats().waiting, pool.audit().unwrap().owned), (0, 0));
}

#[test]
fn batches_are_waited_for() {
    let (pool, other) = (pool(100), pool(100));
    let mut sequence = pool.sequence(SequenceId(7)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 42).unwrap();
    let ticket = batch.ticket();
    let refused = late(|deadline| block_on(pool.settled(&sequence).until(deadline)));
    assert_eq!(refused, Err(SettleError::Deadline { batch: ticket }));
    let to = &other;
    let refused = late(|deadline| block_on(pool.replicate(&sequence, to).until(deadline))).unwrap_err();
    assert!(matches!(refused, TransferError::BeingWritten { batch, .. } if batch == ticket), "{refused}");
    let refused = late(|deadline| block_on(pool.migrate(sequence, to).until(deadline))).unwrap_err();
    let sequence = *refused.sequence;
    let (say, said) = channel();
    threads::scope(|scope| {
        let settled = scope.spawn(|| {
            block_on(pool.settled(&sequence)).unwrap();
            block_on(pool.settled(&sequence).until(far())).unwrap();
            Instant::now()
        });
        let replicated = scope.spawn(|| {
            let mut waiting = pin!(pool.replicate(&sequence, to).until(far()));
            assert!(poll_once(waiting.as_mut()).is_pending());
            say.send(()).unwrap();
            block_on(waiting).unwrap()
        });
        said.recv_timeout(LIMIT).unwrap();
        let before = Instant::now();
        batch.finish();
        assert!(settled.join().unwrap() >= before);
        assert_eq!(replicated.join().unwrap().0.len(), 42);
    });
    let (moved, report) = block_on(pool.migrate(sequence, to).until(far())).unwrap();
    assert_eq!((moved.len(), report.carried.blocks, pool.free_blocks()), (42, 11, 100));
    let preempted = block_on(other.preempt(moved, Preempt::Swap(&pool)).until(far())).unwrap();
    assert_eq!((preempted.freed_blocks, preempted.tokens_kept, other.free_blocks()), (11, 42, 100));
}

/// Compactor runs on several threads take turns.
#[test]
fn compactions_and_resizes_take_turns() {
    let pool = builder(1_000).blocks_max(2_000).build().unwrap();
    let mut kept = checkerboard(&pool);
    threads::scope(|scope| {
        let runs: Vec<_> = (0..4).map(|_| scope.spawn(|| block_on(pool.defragment()).unwrap())).collect();
        let moved: usize = runs.into_iter().map(|run| run.join().unwrap().moved_blocks).sum();
        assert!(moved > 0);
    });
    let after = block_on(pool.defragment()).unwrap().fragmentation_after;
    assert!(after < 0.05, "{after}");
    // The shrink waits for a batch that may read the frames above the new end.
    let batch = pool.begin_batch();
    kept.truncate(400);
    threads::scope(|scope| {
        let options = ResizeOptions::new().patience(LIMIT);
        let resize =
            scope.spawn(move || block_on(pool.resize_with(450, options)).map(|report| (report, pool)));
        thread::sleep(SHORT);
        batch.finish();
        let (report, pool) = resize.join().unwrap().unwrap();
        assert_eq!((report.from, report.to, pool.total_blocks()), (1_000, 450, 450));
        let open = all(&pool);
        let blocked = block_on(pool.resize_with(410, ResizeOptions::new().patience(SHORT)));
        assert!(matches!(blocked, Err(ResizeError::NoRoom { asked: 410, .. })), "{blocked:?}");
        drop(open);
        block_on(pool.resize(2_000)).unwrap();
        drop(kept);
        assert_eq!((pool.free_blocks(), pool.audit().unwrap().owned), (2_000, 0));
    });
}

/// A copy that does not end holds up neither the run that began it nor, if that was dropped, another
/// one for longer than its deadline.
#[test]
fn a_copy_past_its_deadline_is_reported() {
    for is_dropped in [false, true] {
        let held = Arc::new(Mutex::new(Vec::<CopyDone>::new()));
        let keeps = held.clone();
        let copier = Arc::new(move |_: &[FrameMove], done: CopyDone| keeps.lock().unwrap().push(done));
        let pool = builder(256).engine_copies(copier).build().unwrap();
        let kept = checkerboard(&pool);
        let refused = late(|_| {
            let mut first = Box::pin(pool.defragment_with(DefragOptions::new().copy_deadline(SHORT)));
            assert!(poll_once(first.as_mut()).is_pending());
            if is_dropped {
                drop(first);
                return block_on(pool.defragment());
            }
            block_on(first)
        });
        assert!(matches!(refused, Err(DefragError::CopyOverdue { .. })), "{refused:?}");
        assert!(pool.stats().overdue_copy.is_some());
        for done in held.lock().unwrap().drain(..) {
            done(Ok(()));
        }
        assert_eq!((pool.stats().held, pool.stats().overdue_copy), (0, None));
        drop(kept);
        assert_eq!(pool.audit().unwrap().owned, 0);
    }
}

#[test]
fn the_background_task_is_refused() {
    let refused = pool(8).start_defragmenter(DefragConfig::new()).unwrap_err();
    assert_eq!(refused, DefragError::NoRuntime);
}
