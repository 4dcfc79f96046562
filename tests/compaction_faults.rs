//! Copies that fail in every possible way: only the frames of a copy under way are held, nothing
//! hangs.
#![cfg(not(kvpool_loom))]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvpool::compact::{DefragConfig, DefragError, DefragOptions, FrameCopier};
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocRequest, FrameId, Lease, Pool, ResizeError, ResizeOptions};
use kvpool_testkit::leases::{checkerboard, handle};

const BLOCKS: usize = 128;

fn pool(copier: FrameCopier) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(BLOCKS).engine_copies(copier).build().unwrap()
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn frames(leases: &[Lease<'_>]) -> Vec<FrameId> {
    leases.iter().flat_map(Lease::frames).collect()
}

/// Checks that all blocks are in their old frames, and that all free ones can be allocated.
fn is_whole(pool: &Pool, kept: Vec<Lease<'_>>, before: &[FrameId]) {
    let report = pool.audit().unwrap();
    assert_eq!((report.held, report.owned), (0, kept.len()), "{report:?}");
    assert_eq!(frames(&kept), before);
    drop(kept);
    let all = pool.allocate(AllocRequest::new(BLOCKS)).unwrap();
    drop(all);
    assert_eq!(pool.audit().unwrap().owned, 0);
}

/// The panic goes to the polling thread; the wave is put back, and the next run has its turn.
#[test]
fn a_copier_that_panics_puts_the_wave_back() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let pool = pool(Arc::new(move |_: &[FrameMove], done: CopyDone| {
        if counted.fetch_add(1, Relaxed) == 0 {
            panic!("on purpose");
        }
        drop(done);
    }));
    let kept = checkerboard(&pool);
    let before = frames(&kept);
    let panicked = catch_unwind(AssertUnwindSafe(|| poll(pin!(pool.defragment())).is_ready()));
    assert!(panicked.is_err());
    assert_eq!(pool.audit().unwrap().held, 0, "the unwinding dropped the wave");
    let again = poll(pin!(pool.defragment()));
    assert!(matches!(again, Poll::Ready(Err(DefragError::CopyDropped { .. }))), "{again:?}");
    assert_eq!(calls.load(Relaxed), 2);
    is_whole(&pool, kept, &before);
}

/// A background task whose copier panics ends, and its `stop` reports the panic.
#[tokio::test]
async fn a_background_task_ends_with_its_copier() {
    let pool = pool(Arc::new(|_: &[FrameMove], _: CopyDone| panic!("on purpose")));
    let kept = checkerboard(&pool);
    let before = frames(&kept);
    let config = DefragConfig::new().interval(Duration::from_millis(1));
    let task = pool.start_defragmenter(config).unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let stopped = tokio::spawn(tokio::time::timeout(Duration::from_secs(30), task.stop())).await;
    assert!(stopped.is_err_and(|error| error.is_panic()), "the error is not the copier's panic");
    is_whole(&pool, kept, &before);
}

type Asked = Arc<Mutex<Vec<CopyDone>>>;

fn never(asked: &Asked) -> FrameCopier {
    let asked = asked.clone();
    Arc::new(move |_: &[FrameMove], done: CopyDone| asked.lock().unwrap().push(done))
}

/// A copy that never ends, of a run that was dropped: the audit reports the held frames; owners
/// continue, and may free moving blocks. The copy ends after the pool is gone, or never: neither
/// hangs, and only what the copier keeps is leaked.
#[test]
fn a_copy_that_never_ends_holds_its_frames_and_nothing_else() {
    for ends_late in [true, false] {
        let asked = Asked::default();
        let copier = never(&asked);
        let is_alive: Weak<_> = Arc::downgrade(&copier);
        let pool = pool(copier);
        let mut kept = checkerboard(&pool);
        {
            let mut run = pin!(pool.defragment());
            assert!(poll(run.as_mut()).is_pending());
        }
        let moving = pool.audit().unwrap().held;
        assert!(moving > 0);
        // No thread waits for it to free or allocate; only another run does.
        let second = kept.split_off(kept.len() / 2);
        drop(kept);
        let report = pool.audit().unwrap();
        let left = report.held - moving;
        assert!(left > 0, "the mover holds frames of released blocks: {report:?}");
        assert_eq!(pool.free_blocks(), BLOCKS - second.len() - moving - left);
        assert!(poll(pin!(pool.defragment())).is_pending(), "the copy has the compaction lock");
        let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
        drop(rest);
        drop(second);
        assert_eq!(pool.audit().unwrap().owned, 0);
        let done = asked.lock().unwrap().pop().unwrap();
        if ends_late {
            drop(pool);
            done(Ok(()));
        } else {
            done(Ok(()));
            assert_eq!((pool.audit().unwrap().held, pool.free_blocks()), (0, BLOCKS));
            drop(pool);
        }
        assert!(asked.lock().unwrap().is_empty());
        drop(asked);
        assert!(is_alive.upgrade().is_none(), "the copier is dropped with the pool");
    }
}

const DEADLINE: Duration = Duration::from_secs(5);

/// The run that waits for a late copy ends, and names it; later runs do so at once, until the
/// copier reports the result.
#[tokio::test(start_paused = true)]
async fn a_copy_past_its_deadline_is_reported_and_holds_up_no_other() {
    let asked = Asked::default();
    let pool = pool(never(&asked));
    let kept = checkerboard(&pool);
    let options = DefragOptions::new().copy_deadline(DEADLINE);
    let begun = tokio::time::Instant::now();
    let Err(DefragError::CopyOverdue { copy, report }) = pool.defragment_with(options).await else {
        panic!("the copy never began")
    };
    assert!(begun.elapsed() >= DEADLINE && copy.waited >= DEADLINE);
    assert_eq!(
        (copy.bytes, report.moved_blocks),
        ((copy.blocks * pool.layout().bytes_per_block()) as u64, 0)
    );
    let stats = pool.stats();
    assert_eq!((stats.held, stats.overdue_copy.unwrap().blocks), (copy.blocks, copy.blocks));
    // Neither waits, and no more frames are held.
    let begun = tokio::time::Instant::now();
    let again = pool.defragment().await.unwrap_err();
    assert!(matches!(again, DefragError::CopyOverdue { copy: same, .. } if same.blocks == copy.blocks));
    assert!(again.to_string().contains("past its deadline"), "{again}");
    let refused = pool.resize(BLOCKS / 2).await.unwrap_err();
    assert!(matches!(refused, ResizeError::Defrag(DefragError::CopyOverdue { .. })), "{refused:?}");
    assert!(begun.elapsed() < DEADLINE);
    assert_eq!((pool.stats().held, pool.total_blocks()), (copy.blocks, BLOCKS));
    pool.audit().unwrap();
    // The copy ended late: the wave is published, and runs continue.
    let mut done = std::mem::take(&mut *asked.lock().unwrap());
    assert_eq!(done.len(), 1);
    done.pop().unwrap()(Ok(()));
    assert_eq!((pool.stats().held, pool.stats().overdue_copy), (0, None));
    pool.audit().unwrap();
    drop(kept);
    pool.resize(BLOCKS / 2).await.unwrap();
    assert_eq!(pool.audit().unwrap().owned, 0);
}

/// A copy of a dropped run: a run that waits for its turn gets it when the copy is late.
#[tokio::test(start_paused = true)]
async fn a_late_copy_of_a_dropped_run_gives_up_the_lock() {
    for drops in [true, false] {
        let asked = Asked::default();
        let pool = pool(never(&asked));
        let kept = checkerboard(&pool);
        {
            let mut run = pin!(pool.defragment_with(DefragOptions::new().copy_deadline(DEADLINE)));
            assert!(poll(run.as_mut()).is_pending());
        }
        let begun = tokio::time::Instant::now();
        // Runs without moves continue then; this one needs moves.
        let moves = DefragOptions::new().copy_deadline(3 * DEADLINE);
        let options = ResizeOptions::new().moves(moves).patience(DEADLINE * 3 / 2);
        let refused = pool.resize_with(BLOCKS / 2, options).await.unwrap_err();
        assert!(matches!(refused, ResizeError::Defrag(DefragError::CopyOverdue { .. })), "{refused:?}");
        // The patience counts for the turn, and again for the moves.
        assert!(begun.elapsed() >= DEADLINE && begun.elapsed() < 3 * DEADLINE, "{:?}", begun.elapsed());
        let done = asked.lock().unwrap().pop().unwrap();
        if drops {
            drop(done)
        } else {
            done(Ok(()))
        }
        assert_eq!((pool.audit().unwrap().held, pool.stats().overdue_copy), (0, None));
        drop(kept);
        pool.resize(BLOCKS / 2).await.unwrap();
    }
}

/// The task continues, counts the late copy, and stops in time.
#[tokio::test(start_paused = true)]
async fn a_background_task_survives_a_late_copy() {
    let asked = Asked::default();
    let pool = pool(never(&asked));
    let _kept = checkerboard(&pool);
    let config = DefragConfig::new().interval(Duration::from_millis(1));
    let config = config.moves(DefragOptions::new().copy_deadline(DEADLINE));
    let task = pool.start_defragmenter(config).unwrap();
    tokio::time::sleep(2 * DEADLINE).await;
    assert!(task.totals().failed > 0);
    let begun = tokio::time::Instant::now();
    task.stop().await;
    assert!(begun.elapsed() < DEADLINE);
    assert_eq!(asked.lock().unwrap().len(), 1, "no second wave");
}

/// A thread that is stopped forever during a wave holds back the wave's frames. Others, and other
/// runs, continue.
#[test]
fn a_forgotten_wave_holds_its_frames_and_nothing_else() {
    let pool = pool(Arc::new(|_: &[FrameMove], done: CopyDone| done(Ok(()))));
    let mut kept = checkerboard(&pool);
    let free: Vec<FrameId> = {
        let mut free = Vec::new();
        pool.trim();
        pool.blocks().for_each_free_run(&mut |run| free.extend(run.frames()));
        free
    };
    let pairs: Vec<_> = frames(&kept[..5]).into_iter().zip(free).collect();
    let wave = pool.blocks().begin_wave(pairs, &mut |frame, why| panic!("{frame}: {why:?}"));
    assert_eq!(wave.len(), 5);
    std::mem::forget(wave);
    assert_eq!(pool.audit().unwrap().held, 5);
    // A marked block is not moved by others, and not reopened.
    let before = frames(&kept[..5]);
    let report = {
        let mut run = pin!(pool.defragment());
        // Between waves it yields.
        (0..100).find_map(|_| match poll(run.as_mut()) {
            Poll::Ready(report) => Some(report.unwrap()),
            Poll::Pending => None,
        })
    };
    let report = report.expect("it hangs");
    assert!(report.moved_blocks > 10, "{report:?}");
    assert_eq!(frames(&kept[..5]), before);
    assert!(!kept[0].reopen(0));
    // Pins and shares work as always.
    let (pin, shared) = (pool.pin_scoped(handle(&kept[1])).unwrap(), kept[2].share().unwrap());
    drop((pin, kept));
    drop(shared);
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held), (0, 10), "sources and destinations");
    assert_eq!(pool.free_blocks(), BLOCKS - 10);
    let all = pool.allocate(AllocRequest::new(BLOCKS - 10)).unwrap();
    assert!(pool.allocate(AllocRequest::new(1)).is_err());
    drop(all);
    // A pool cannot shrink below held frames.
    assert!(pool.blocks().begin_shrink(1).unwrap().collect() > 0);
    pool.audit().unwrap();
}

/// A thread that panics during a wave releases all of its frames.
#[test]
fn a_thread_that_dies_in_a_wave_cancels_it() {
    let pool = pool(Arc::new(|_: &[FrameMove], done: CopyDone| done(Ok(()))));
    let kept = checkerboard(&pool);
    let before = frames(&kept);
    pool.trim();
    let mut free = Vec::new();
    pool.blocks().for_each_free_run(&mut |run| free.extend(run.frames()));
    let died = kvpool_testkit::threads::scope(|scope| {
        let pairs: Vec<_> = before.iter().copied().zip(free).collect();
        let pool = &pool;
        scope
            .spawn(move || {
                let wave = pool.blocks().begin_wave(pairs, &mut |_, _| {});
                assert!(wave.len() > 10);
                std::panic::resume_unwind(Box::new("on purpose"));
            })
            .join()
    });
    assert!(died.is_err());
    is_whole(&pool, kept, &before);
}
