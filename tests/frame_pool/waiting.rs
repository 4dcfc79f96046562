//! Waiting allocations: the line of any pool, leases, deadlines.

use std::time::Duration;

use kvpool::compact::Goal;
use kvpool::{AllocError, AllocRequest, FramePool, Priority};
use tokio::time::{sleep, timeout};

use super::{allocate, key, pool, references};

/// Longer than any wait in this file, on any machine.
const LIMIT: Duration = Duration::from_secs(30);

async fn in_line(pool: &FramePool, count: usize) {
    let waits = async {
        while pool.metrics().stats.waiting != count {
            tokio::task::yield_now().await;
        }
    };
    timeout(LIMIT, waits).await.expect("requests that wait");
}

fn request(pool: &FramePool, request: AllocRequest) -> tokio::task::JoinHandle<Result<Vec<u32>, AllocError>> {
    let pool = pool.clone();
    tokio::spawn(async move {
        timeout(LIMIT, pool.allocate_async(request)).await.unwrap().map(|l| l.into_frames())
    })
}

#[tokio::test]
async fn requests_are_served_by_priority_and_order_of_arrival() {
    let pool = pool(8);
    let all = allocate(&pool, 8);
    let first = request(&pool, AllocRequest::new(4));
    in_line(&pool, 1).await;
    let second = request(&pool, AllocRequest::new(1));
    in_line(&pool, 2).await;
    let urgent = request(&pool, AllocRequest::new(2).priority(Priority::Urgent));
    in_line(&pool, 3).await;
    pool.free(&all[..2]).unwrap();
    let urgent = urgent.await.unwrap().unwrap();
    assert_eq!(references(&pool, &urgent), [1, 1]);
    assert!(!second.is_finished(), "a small request does not overtake a large one");
    pool.free(&all[2..7]).unwrap();
    assert_eq!(first.await.unwrap().unwrap().len(), 4);
    assert_eq!(second.await.unwrap().unwrap().len(), 1);
    let metrics = pool.metrics();
    assert_eq!((metrics.waits.waits, metrics.waits.granted), (3, 3));
    assert_eq!((metrics.allocations.requests, metrics.allocations.blocks), (4, 15));
    assert_eq!(metrics.latencies.wait.count(), 3);
    assert_eq!(pool.audit().unwrap().owned, 8);
}

#[tokio::test]
async fn a_freed_frame_that_is_cached_wakes_a_waiting_request() {
    let pool = pool(4);
    let all = allocate(&pool, 4);
    pool.register(&[(all[0], key(&pool, 1))]).unwrap();
    for evict_first in [false, true] {
        let waiting = request(&pool, AllocRequest::new(1));
        in_line(&pool, 1).await;
        if evict_first { pool.free_evict_first(&all[..1]) } else { pool.free(&all[..1]) }.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap(), all[..1]);
        assert_eq!(pool.cached(key(&pool, 1)), Ok(None), "evicted");
        pool.register(&[(all[0], key(&pool, 1))]).unwrap();
    }
    // The end of a batch wakes it, too.
    let (batch, waiting) = (pool.begin_batch(), request(&pool, AllocRequest::new(1)));
    in_line(&pool, 1).await;
    pool.free(&all[..1]).unwrap();
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished(), "a batch may see it");
    drop(batch);
    assert_eq!(waiting.await.unwrap().unwrap(), all[..1]);
}

#[tokio::test]
async fn a_dropped_wait_passes_its_turn_on_and_a_dropped_lease_frees() {
    let pool = pool(4);
    let all = allocate(&pool, 4);
    let (head, next) = (request(&pool, AllocRequest::new(3)), request(&pool, AllocRequest::new(1)));
    in_line(&pool, 2).await;
    pool.free(&all[..1]).unwrap();
    head.abort();
    assert_eq!(next.await.unwrap().unwrap(), all[..1]);
    in_line(&pool, 0).await;
    pool.free(&all).unwrap();

    let lease = pool.allocate_async(AllocRequest::new(2)).await.unwrap();
    assert_eq!(references(&pool, lease.frames()), [1, 1]);
    drop(lease);
    // Freed by number: the lease has nothing left to free.
    let lease = pool.allocate_async(AllocRequest::new(2)).await.unwrap();
    pool.free(lease.frames()).unwrap();
    drop(lease);
    assert_eq!((pool.available(), pool.audit().unwrap().owned), (4, 0));
    // Freed in part: the lease frees the rest, and keeps a reference that was added.
    let lease = pool.allocate_async(AllocRequest::new(3)).await.unwrap();
    let frames = lease.frames().to_vec();
    pool.share(&frames[2..]).unwrap();
    pool.free(&frames[1..2]).unwrap();
    drop(lease);
    assert_eq!(references(&pool, &frames), [0, 0, 1]);
    pool.free(&frames[2..]).unwrap();
    assert_eq!((pool.available(), pool.audit().unwrap().owned), (4, 0));
}

#[tokio::test]
async fn deadlines_and_impossible_requests_are_refused() {
    let pool = pool(4);
    let all = allocate(&pool, 4);
    let soon = std::time::Instant::now() + Duration::from_millis(20);
    let late = pool.allocate_async(AllocRequest::new(2)).until(soon).await;
    assert!(matches!(late, Err(AllocError::Deadline { asked: 2, free: 0, .. })), "{late:?}");
    let large = pool.allocate_async(AllocRequest::new(5)).await;
    assert_eq!(large.unwrap_err(), AllocError::TooLarge { asked: 5, total: 4 });
    assert_eq!(pool.allocate_async(AllocRequest::new(0)).await.unwrap_err(), AllocError::Zero);
    pool.free(&all).unwrap();
    // Tried once, though the deadline has passed.
    let lease = pool.allocate_async(AllocRequest::new(2)).until(soon).await.unwrap();
    assert_eq!(lease.into_frames().len(), 2);
    let metrics = pool.metrics();
    assert_eq!(
        (metrics.waits.missed_deadlines, metrics.refusals.too_large, metrics.refusals.invalid),
        (1, 1, 1)
    );
    // A shrink below the size of a waiting request refuses it.
    let pool = super::pool(8);
    let held = allocate(&pool, 1);
    let waiting = request(&pool, AllocRequest::new(8));
    in_line(&pool, 1).await;
    pool.shrink(6).unwrap();
    assert_eq!(waiting.await.unwrap().unwrap_err(), AllocError::TooLarge { asked: 8, total: 6 });
    pool.free(&held).unwrap();
}

#[tokio::test]
async fn a_run_is_awaited_until_moves_make_one() {
    let pool = pool(64);
    let all = allocate(&pool, 64);
    // Every fourth frame is cached and was hit: it has references.
    let some: Vec<u32> = all.iter().copied().filter(|frame| frame % 4 == 0).collect();
    let named: Vec<_> = some.iter().map(|&frame| (frame, key(&pool, frame.into()))).collect();
    pool.register(&named).unwrap();
    let rest: Vec<u32> = all.iter().copied().filter(|frame| frame % 4 != 0).collect();
    pool.free(&rest).unwrap();
    let waiting = request(&pool, AllocRequest::new(16).contiguous());
    in_line(&pool, 1).await;
    sleep(Duration::from_millis(5)).await;
    assert!(!waiting.is_finished(), "frames with references are in the way");
    pool.free(&some).unwrap();
    pool.propose_moves(Goal::Run { len: 16 }, 64).commit();
    let run = waiting.await.unwrap().unwrap();
    assert!(run.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{run:?}");
    pool.audit().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[cfg_attr(miri, ignore = "too slow")]
async fn many_tasks_wait_for_frames_beside_resizes() {
    const FRAMES: usize = 64;
    let pool = FramePool::builder(FRAMES).build().unwrap();
    let tasks: Vec<_> = (0..8_u64)
        .map(|seed| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(seed);
                for round in 0..150 {
                    let lease = pool.allocate_async(AllocRequest::new(random.usize(1..=20)));
                    if random.u8(..8) == 0 {
                        // Dropped, perhaps while it waits.
                        let _ = timeout(Duration::from_micros(50), lease).await;
                        continue;
                    }
                    let frames =
                        timeout(LIMIT, lease).await.expect("frames come free").unwrap().into_frames();
                    let named: Vec<_> =
                        frames.iter().map(|&frame| (frame, key(&pool, seed * 1_000 + round))).collect();
                    pool.register(&named[..frames.len() / 2]).unwrap();
                    tokio::task::yield_now().await;
                    if random.bool() { pool.free_evict_first(&frames) } else { pool.free(&frames) }.unwrap();
                }
            })
        })
        .collect();
    let mut shrunk = 0;
    while !tasks.iter().all(|task| task.is_finished()) {
        if pool.shrink(FRAMES / 2).is_ok() {
            shrunk += 1;
            tokio::task::yield_now().await;
            pool.grow(FRAMES / 2).unwrap();
        }
        tokio::task::yield_now().await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    let waits = pool.metrics().waits;
    assert!(shrunk > 0 && waits.granted > 0, "{shrunk} shrinks, {waits:?}");
    pool.trim();
    assert_eq!(pool.audit().unwrap().owned, 0);
    assert_eq!(pool.available(), FRAMES);
}
