//! Many threads: schedulers that allocate, register, hit and free, beside moves and removals.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::Goal;
use kvpool::{AllocRequest, FrameError, FramePool, Order};

use super::key;

const FRAMES: usize = 600;
const THREADS: u64 = 4;
const ROUNDS: u64 = if cfg!(debug_assertions) { 3_000 } else { 30_000 };
const CONTENTS: u64 = 150;

/// What each frame holds, written by the owner of the frame and copied by the mover.
struct Bytes(Vec<AtomicU64>);

/// Waits until this thread alone has a cache in the pool.
fn settle(pool: &FramePool) {
    let begin = Instant::now();
    pool.trim();
    while pool.thread_caches() > 1 {
        assert!(begin.elapsed() < Duration::from_secs(60), "{} thread caches", pool.thread_caches());
        thread::yield_now();
    }
}

fn scheduler(pool: &FramePool, bytes: &Bytes, seed: u64) -> (u64, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut hit, mut refused) = (0, 0);
    let mut tables: Vec<Vec<(u32, u64)>> = Vec::new();
    for _ in 0..ROUNDS {
        let _batch = random.bool().then(|| pool.begin_batch());
        let first = random.u64(0..CONTENTS);
        let contents: Vec<u64> = (first..first + random.u64(1..20)).collect();
        let keys: Vec<_> = contents.iter().map(|&content| key(pool, content)).collect();
        let mut frames = Vec::new();
        let hits = pool.hit(&keys, &mut frames).unwrap();
        hit += hits as u64;
        for (&frame, &content) in frames.iter().zip(&contents) {
            let held = bytes.0[frame as usize].load(Acquire);
            assert!(held % 10_000 == content, "frame {frame} holds {held}, not {content}");
        }
        let missing = contents.len() - hits;
        if missing > 0 && pool.allocate(AllocRequest::new(missing), &mut frames).is_err() {
            refused += 1;
            pool.free(&frames).unwrap();
            frames.clear();
        } else {
            let mut named = Vec::new();
            for ((&frame, &content), &key) in frames.iter().zip(&contents).zip(&keys).skip(hits) {
                bytes.0[frame as usize].store(content, Release);
                named.push((frame, key));
                // A second key, whose content says the same.
                named.push((frame, super::key(pool, content + 10_000)));
            }
            pool.register(&named).unwrap();
        }
        tables.push(frames.iter().copied().zip(contents).collect());
        while tables.len() > 6 || refused > 0 && tables.len() > 3 {
            let table = tables.swap_remove(random.usize(..tables.len()));
            for &(frame, content) in &table {
                let held = bytes.0[frame as usize].load(Acquire);
                assert!(held % 10_000 == content, "frame {frame} holds {held}, not {content}");
            }
            let frames: Vec<u32> = table.iter().rev().map(|&(frame, _)| frame).collect();
            if random.u8(..3) == 0 {
                pool.uncache(&frames).unwrap();
            }
            if random.u8(..3) == 0 { pool.free_evict_first(&frames) } else { pool.free(&frames) }.unwrap();
            if random.u8(..16) == 0 {
                pool.unregister(key(pool, random.u64(..CONTENTS))).unwrap();
            }
        }
    }
    for table in tables {
        pool.free(&table.iter().map(|&(frame, _)| frame).collect::<Vec<_>>()).unwrap();
    }
    (hit, refused)
}

fn mover(pool: &FramePool, bytes: &Bytes, done: &AtomicBool) -> usize {
    let mut moved = 0;
    while !done.load(Acquire) {
        let moves = pool.propose_moves(Goal::Fragmentation { order: Order(2) }, 64);
        for (from, to) in moves.pairs() {
            let held = bytes.0[from as usize].load(Acquire);
            bytes.0[to as usize].store(held, Release);
        }
        moved += moves.commit().moved.len();
        thread::yield_now();
    }
    moved
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn schedulers_beside_moves_and_removals() {
    let pool = FramePool::builder(FRAMES).build().unwrap();
    let bytes = Bytes((0..=FRAMES).map(|_| AtomicU64::new(0)).collect());
    let done = AtomicBool::new(false);
    let (hits, moved) = kvpool_testkit::threads::scope(|scope| {
        let (pool, bytes, done) = (&pool, &bytes, &done);
        let mover = scope.spawn(move || mover(pool, bytes, done));
        let schedulers: Vec<_> =
            (0..THREADS).map(|seed| scope.spawn(move || scheduler(pool, bytes, seed))).collect();
        let outcomes = schedulers.into_iter().map(|thread| thread.join());
        let outcomes: Vec<_> = outcomes.collect();
        done.store(true, Release);
        let moved = mover.join().unwrap();
        (outcomes.into_iter().map(|outcome| outcome.unwrap().0).sum::<u64>(), moved)
    });
    settle(&pool);
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, report.references), (0, 0, 0), "{report:?}");
    assert!(hits > 1_000 && moved > 0, "{hits} hits, {moved} moves");
    let metrics = pool.metrics();
    assert!(metrics.evictions.evict_first > 0 && metrics.moves.moved_blocks == moved as u64, "{metrics:?}");
    assert_eq!(
        metrics.allocations.blocks,
        metrics.allocations.freed_blocks + metrics.evictions.total() + metrics.stats.evictable as u64,
        "{metrics:?}"
    );
    let mut all = Vec::new();
    pool.allocate(AllocRequest::new(FRAMES), &mut all).unwrap();
    pool.free(&all).unwrap();
    pool.audit().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn threads_share_and_register_the_same_frames() {
    let pool = FramePool::builder(64).build().unwrap();
    let mut frames = Vec::new();
    pool.allocate(AllocRequest::new(16), &mut frames).unwrap();
    kvpool_testkit::threads::scope(|scope| {
        for seed in 0..THREADS {
            let (pool, frames) = (&pool, &frames);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..ROUNDS {
                    let some: Vec<u32> = frames.iter().copied().filter(|_| random.bool()).collect();
                    pool.share(&some).unwrap();
                    let content = random.u64(..8);
                    let named: Vec<_> = some.iter().map(|&frame| (frame, key(pool, content))).collect();
                    match random.u8(..4) {
                        0 => drop(pool.uncache(&some).unwrap()),
                        1 => drop(pool.unregister(key(pool, content)).unwrap()),
                        _ => pool.register(&named).unwrap(),
                    }
                    pool.free(&some).unwrap();
                }
            });
        }
    });
    settle(&pool);
    // Each key that a frame has is found, or is known to have found no room.
    let known: Vec<u64> =
        (0..8).filter(|&content| pool.cached(key(&pool, content)).unwrap().is_some()).collect();
    let has = |content: u64| {
        let hash = key(&pool, content).hash();
        frames.iter().any(|&frame| pool.hashes(frame).unwrap().contains(&hash))
    };
    let expected: Vec<u64> = (0..8).filter(|&content| has(content)).collect();
    if pool.cache_stats().forgotten_blocks == 0 {
        assert_eq!(known, expected);
    }
    assert_eq!(pool.audit().unwrap().references, 16);
    pool.uncache(&frames).unwrap();
    pool.free(&frames).unwrap();
    assert_eq!(pool.audit().unwrap().in_bitmap + pool.audit().unwrap().in_magazines, 64);
}

/// Lists that are freed by runs, while other threads free, share or register frames of them after
/// the check.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn threads_change_frames_of_a_list_that_is_freed_or_kept() {
    const LEN: usize = 120;
    let pool = FramePool::builder(LEN).magazine_frames(8).build().unwrap();
    for round in 0..1_000 {
        let mut frames = super::allocate(&pool, LEN);
        match round % 4 {
            0 => frames.sort_unstable(),
            1 => frames.sort_unstable_by(|a, b| b.cmp(a)),
            _ => {}
        }
        let start = std::sync::Barrier::new(2);
        let (pool, frames, start) = (&pool, &frames, &start);
        let (mine, others) = kvpool_testkit::threads::scope(|scope| {
            let other = scope.spawn(move || {
                start.wait();
                let free = |frames: &[u32]| pool.free(frames);
                if round % 3 == 0 {
                    return free(frames);
                }
                // Frames that are freed by now are refused.
                for &frame in &frames[round % LEN..] {
                    if round % 3 == 1 {
                        if pool.share(&[frame]).is_ok() {
                            free(&[frame])?;
                        }
                    } else {
                        let _ = pool.register(&[(frame, key(pool, u64::from(frame)))]);
                    }
                }
                Ok(())
            });
            start.wait();
            let mine = if round / 12 % 2 == 0 { pool.free(frames) } else { pool.keep(frames) };
            (mine, other.join().unwrap())
        });
        if round % 3 == 0 {
            assert!(mine.is_err() || others.is_err(), "two threads have freed the same frames");
        } else {
            assert_eq!((mine, others), (Ok(()), Ok(())), "round {round}");
        }
        for outcome in [mine, others] {
            match outcome {
                Ok(()) => {}
                Err(FrameError::Free { index, frame } | FrameError::Unreferenced { index, frame }) => {
                    assert_eq!(frames[index], frame.0);
                }
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        settle(pool);
        let report = pool.audit().unwrap();
        assert_eq!((report.owned, report.references), (0, 0), "round {round}: {report:?}");
        assert_eq!(report.evictable, pool.counts().evictable, "round {round}");
    }
}
