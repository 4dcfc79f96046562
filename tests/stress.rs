//! Stress tests: real threads on one pool, each test ending in an audit.
//!
//! The seed is printed; `KVPOOL_SEED=<seed>` repeats its random choices (the schedule is up to the
//! machine). `KVPOOL_STRESS_STEPS=<steps>` makes the tests longer.
#![cfg(not(kvpool_loom))]

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*, fence};
use std::sync::{Mutex, mpsc};
use std::thread;

use fastrand::Rng;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocError, AllocRequest, BlockHandle, BlockId, Generation, Pool, Ticket};
use kvpool_testkit::threads;

const THREADS: usize = if cfg!(miri) { 2 } else { 4 };
const BLOCKS: usize = if cfg!(miri) { 100 } else { 1000 };
const BLOCKS_MAX: usize = 3 * BLOCKS;

fn pool() -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).dtype(Dtype::F32);
    Pool::builder(layout.build().unwrap())
        .blocks(BLOCKS)
        .blocks_max(BLOCKS_MAX)
        .segment_blocks(256)
        .without_storage()
        .build()
        .unwrap()
}

/// Returns the number of steps of a thread in one test.
fn steps() -> usize {
    let given = std::env::var("KVPOOL_STRESS_STEPS").ok().and_then(|steps| steps.parse().ok());
    given.unwrap_or(if cfg!(miri) { 60 } else { 40_000 })
}

fn seed() -> u64 {
    let given = std::env::var("KVPOOL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| if cfg!(miri) { 1 } else { fastrand::u64(..) });
    eprintln!("KVPOOL_SEED={seed}");
    seed
}

/// Raises a flag when dropped, also by a panic, so that no thread waits for the flag forever.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Number of references that the threads hold on each block, counted outside of the pool.
struct Oracle(Box<[AtomicUsize]>);

impl Oracle {
    fn new() -> Self {
        Self((0..=BLOCKS_MAX).map(|_| AtomicUsize::new(0)).collect())
    }

    /// Records handles that the pool handed out: no thread may hold one already.
    fn allocated(&self, handles: &[BlockHandle]) {
        for handle in handles {
            let before = self.0[handle.id.index()].fetch_add(1, Relaxed);
            assert_eq!(before, 0, "{handle} was handed out while a thread held it");
        }
    }

    fn shared(&self, handles: &[BlockHandle]) {
        for handle in handles {
            let before = self.0[handle.id.index()].fetch_add(1, Relaxed);
            assert_ne!(before, 0, "{handle} was shared without a reference");
        }
    }

    /// Records handles about to be freed.
    fn freeing(&self, handles: &[BlockHandle]) {
        for handle in handles {
            let before = self.0[handle.id.index()].fetch_sub(1, Relaxed);
            assert_ne!(before, 0, "{handle} is freed without a reference");
        }
    }
}

/// Allocates every free block from one thread, whatever the others have cached, and frees them
/// again.
fn everything_can_be_got(pool: &Pool) {
    let free = pool.free_blocks();
    let mut handles = Vec::new();
    while handles.len() < free {
        let ask = 17.min(free - handles.len());
        let before = handles.len();
        pool.allocate_raw(AllocRequest::new(ask), &mut handles)
            .unwrap_or_else(|error| panic!("{before} of {free} free blocks were allocated: {error}"));
    }
    assert!(matches!(pool.allocate(AllocRequest::new(1)), Err(AllocError::Exhausted { free: 0, .. })));
    pool.free(&handles).unwrap();
}

fn quiescent(pool: &Pool, expected_free: usize) {
    assert_eq!(pool.free_blocks(), expected_free);
    pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
    everything_can_be_got(pool);
    pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(pool.free_blocks(), expected_free);
}

/// Every thread performs every operation; handles pass between threads through mailboxes.
#[test]
fn threads_mix_everything() {
    let (pool, oracle, seed) = (pool(), Oracle::new(), seed());
    let mailboxes: Vec<Mutex<Vec<BlockHandle>>> = (0..THREADS).map(|_| Mutex::default()).collect();
    threads::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, oracle, mailboxes) = (&pool, &oracle, &mailboxes);
            scope.spawn(move || mix(pool, oracle, mailboxes, thread, Rng::with_seed(seed ^ thread as u64)));
        }
    });
    let left: Vec<BlockHandle> =
        mailboxes.into_iter().flat_map(|mailbox| mailbox.into_inner().unwrap()).collect();
    oracle.freeing(&left);
    pool.free(&left).unwrap();
    quiescent(&pool, BLOCKS);
}

fn mix(pool: &Pool, oracle: &Oracle, mailboxes: &[Mutex<Vec<BlockHandle>>], thread: usize, mut rng: Rng) {
    let cache = pool.handle();
    let mut held: Vec<BlockHandle> = Vec::new();
    let mut batches = Vec::new();
    for _ in 0..steps() {
        match rng.u32(..16) {
            0..5 => {
                let many = if rng.u32(..8) == 0 { 60 } else { 6 };
                let mut request = AllocRequest::new(rng.usize(1..=many));
                request.contiguous = rng.u32(..6) == 0;
                request.pinned = rng.bool();
                let first = held.len();
                let got = if rng.bool() {
                    pool.allocate_raw(request, &mut held)
                } else {
                    cache.allocate_raw(request, &mut held)
                };
                match got {
                    Ok(_) => oracle.allocated(&held[first..]),
                    Err(_) => assert_eq!(held.len(), first, "a refused allocation left handles"),
                }
            }
            5..10 => {
                let given = rng.usize(..=held.len().min(40));
                rng.shuffle(&mut held);
                let freed = held.split_off(held.len() - given);
                oracle.freeing(&freed);
                if rng.bool() { pool.free(&freed) } else { cache.free(&freed) }.unwrap();
            }
            10 if !held.is_empty() => {
                let shared = held[rng.usize(..held.len())];
                pool.share(&[shared]).unwrap();
                oracle.shared(&[shared]);
                held.push(shared);
            }
            11 if !held.is_empty() => {
                let given = held.split_off(held.len() - rng.usize(1..=held.len().min(8)));
                mailboxes[(thread + 1) % mailboxes.len()].lock().unwrap().extend(given);
            }
            12 => held.append(&mut mailboxes[thread].lock().unwrap()),
            13 if batches.len() < 4 => batches.push(pool.begin_batch()),
            14 if !batches.is_empty() => batches.swap_remove(rng.usize(..batches.len())).finish(),
            15 if held.len() < 100 => {
                let Ok(lease) = pool.allocate(AllocRequest::new(rng.usize(1..=10))) else { continue };
                oracle.allocated(&lease.handles().collect::<Vec<_>>());
                if rng.bool() {
                    held.extend(lease.into_raw());
                } else {
                    oracle.freeing(&lease.handles().collect::<Vec<_>>());
                    drop(lease);
                }
            }
            _ => {}
        }
    }
    oracle.freeing(&held);
    cache.free(&held).unwrap();
}

/// The pool grows while threads allocate; they finally own blocks in every part of it.
#[test]
fn threads_allocate_while_the_pool_grows() {
    let (pool, oracle, seed) = (pool(), Oracle::new(), seed());
    let grown = AtomicBool::new(false);
    threads::scope(|scope| {
        for thread in 0..THREADS - 1 {
            let (pool, oracle, grown) = (&pool, &oracle, &grown);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(seed ^ thread as u64);
                let mut held = Vec::new();
                while !grown.load(Relaxed) || rng.u32(..200) != 0 {
                    let first = held.len();
                    if pool.allocate_raw(AllocRequest::new(rng.usize(1..=20)), &mut held).is_ok() {
                        oracle.allocated(&held[first..]);
                    } else {
                        let freed = held.split_off(held.len() / 2);
                        oracle.freeing(&freed);
                        pool.free(&freed).unwrap();
                    }
                }
                oracle.freeing(&held);
                pool.free(&held).unwrap();
            });
        }
        let _raise = Raise(&grown);
        let mut rng = Rng::with_seed(!seed);
        let mut total = BLOCKS;
        while total < BLOCKS_MAX {
            let by = rng.usize(1..=100).min(BLOCKS_MAX - total);
            pool.grow(by).unwrap();
            total += by;
            thread::yield_now();
        }
    });
    assert!(pool.grow(1).is_err());
    quiescent(&pool, BLOCKS_MAX);
}

/// A block that a batch saw is not handed out again before that batch ends, although it was freed.
///
/// One thread replaces the block in a slot and frees the old one; others begin a batch, read the
/// slot, and check the block's stamp until they end: a new owner would have changed it.
#[test]
fn a_block_that_a_batch_saw_is_not_reused() {
    let (pool, stop) = (pool(), AtomicBool::new(false));
    let stamps: Vec<AtomicU64> = (0..=BLOCKS).map(|_| AtomicU64::new(0)).collect();
    // The block's id in the low bits, its stamp in the high bits.
    let slot = AtomicU64::new(0);
    let replace = |stamp: u64| {
        let mut handles = Vec::new();
        while let Err(error) = pool.allocate_raw(AllocRequest::new(1), &mut handles) {
            // A reader was stopped in its batch for so long that all other blocks are retired.
            assert!(matches!(error, AllocError::Exhausted { retired: 1.., .. }), "{error}");
            thread::yield_now();
        }
        let id = handles[0].id;
        stamps[id.index()].store(stamp, Relaxed);
        slot.store(u64::from(id.get()) | stamp << 32, Release);
        handles[0]
    };
    let mut old = replace(1);
    threads::scope(|scope| {
        for _ in 1..THREADS {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let batch = pool.begin_batch();
                    let seen = slot.load(Acquire);
                    let stamp = &stamps[(seen as u32) as usize];
                    for _ in 0..20 {
                        assert_eq!(stamp.load(Relaxed), seen >> 32, "the block has a new owner");
                        std::hint::spin_loop();
                    }
                    batch.finish();
                }
            });
        }
        let _raise = Raise(&stop);
        for stamp in 2..steps() as u64 {
            let new = replace(stamp);
            // The slot no longer names the old block; pairs with the fence of batches that begin.
            fence(SeqCst);
            pool.free(&[old]).unwrap();
            old = new;
        }
    });
    pool.free(&[old]).unwrap();
    quiescent(&pool, BLOCKS);
}

/// Threads that end while they hold leases, handles and batches: unwinding gives all of them back,
/// and only the blocks leaked on purpose stay owned.
#[test]
fn threads_that_die_leak_nothing() {
    let (pool, seed) = (pool(), seed());
    let forgotten = AtomicUsize::new(0);
    threads::scope(|scope| {
        for thread in 0..2 * THREADS {
            let (pool, forgotten) = (&pool, &forgotten);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(seed ^ thread as u64);
                let lease = pool.allocate(AllocRequest::new(10)).unwrap();
                let cache = pool.handle();
                let mut handles = Vec::new();
                for _ in 0..rng.usize(1..50) {
                    cache.allocate_raw(AllocRequest::new(2), &mut handles).unwrap();
                    cache.free(&handles.split_off(1)).unwrap();
                    cache.free(&mem::take(&mut handles)).unwrap();
                }
                match thread % 4 {
                    // The cache is never dropped: other threads must be able to allocate its blocks
                    // nevertheless.
                    0 => mem::forget(cache),
                    // These are never freed.
                    1 => {
                        forgotten.fetch_add(10, Relaxed);
                        mem::forget(lease);
                    }
                    2 => {
                        let died = catch_unwind(AssertUnwindSafe(|| {
                            let _batch = pool.begin_batch();
                            let _lease = lease;
                            let _cache = cache;
                            std::panic::resume_unwind(Box::new("on purpose"));
                        }));
                        assert!(died.is_err());
                    }
                    _ => {}
                }
            });
        }
    });
    quiescent(&pool, BLOCKS - forgotten.into_inner());
}

/// A thread that is stopped forever, with a loaded cache and an explicit one, strands no block.
#[test]
fn a_stopped_thread_strands_no_block() {
    let pool = pool();
    let (loaded, is_loaded) = mpsc::channel();
    // Closed at the end, also by a panic; then the stopped thread ends.
    let (done, is_done) = mpsc::channel::<()>();
    threads::scope(|scope| {
        let (pool, done) = (&pool, done);
        scope.spawn(move || {
            let cache = pool.handle();
            let mut handles = Vec::new();
            for _ in 0..100 {
                pool.allocate_raw(AllocRequest::new(1), &mut handles).unwrap();
                cache.allocate_raw(AllocRequest::new(1), &mut handles).unwrap();
                if handles.len() == 40 {
                    let second = handles.split_off(20);
                    pool.free(&mem::take(&mut handles)).unwrap();
                    cache.free(&second).unwrap();
                }
            }
            pool.free(&handles).unwrap();
            loaded.send(()).unwrap();
            is_done.recv().unwrap_err();
        });
        is_loaded.recv().unwrap();
        assert_eq!(pool.free_blocks(), BLOCKS);
        everything_can_be_got(pool);
        // Also as one run: every frame is in the bitmaps again.
        drop(pool.allocate(AllocRequest::new(BLOCKS).contiguous()).unwrap());
        drop(done);
    });
    quiescent(&pool, BLOCKS);
}

/// Handles that no lease gave out, but that are right by chance, pin blocks at the moment of their
/// release: each block is still freed once, without the pins.
#[test]
fn forged_pins_beside_releases() {
    const PINS: usize = if cfg!(miri) { 10 } else { 10_000 };
    let pool = pool();
    let (is_over, newest) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
    let pins = AtomicUsize::new(0);
    threads::scope(|scope| {
        let (pool, is_over, newest, pins) = (&pool, &is_over, &newest, &pins);
        for _ in 1..THREADS {
            scope.spawn(move || {
                while !is_over.load(Relaxed) {
                    let bits = newest.load(Relaxed);
                    let (id, generation) = (BlockId(bits as u32), Generation(bits >> 32));
                    let forged = BlockHandle { id, pool: pool.tag(), generation };
                    pins.fetch_add(usize::from(pool.pin_scoped(forged).is_ok()), Relaxed);
                }
            });
        }
        let _over = Raise(is_over);
        let mut rng = Rng::with_seed(seed());
        let mut generations = vec![0u64; BLOCKS_MAX + 1];
        let mut step = 0;
        while step < steps() || pins.load(Relaxed) < PINS {
            let lease = pool.allocate(AllocRequest::new(1 + step % 3)).unwrap();
            for id in lease.blocks() {
                let generation = &mut generations[id.get() as usize];
                newest.store(u64::from(id.get()) | *generation << 32, Relaxed);
                *generation += 1;
            }
            // Time for others to find it.
            (0..rng.usize(..20)).for_each(|_| std::hint::spin_loop());
            step += 1;
        }
    });
    let lease = pool.allocate(AllocRequest::new(BLOCKS)).unwrap();
    for handle in lease.handles() {
        assert_eq!(pool.info(handle).unwrap().pins, 0);
    }
    drop(lease);
    quiescent(&pool, BLOCKS);
}

/// A batch that is stopped forever holds back frames freed since it began, and no others.
#[test]
fn a_stopped_batch_holds_back_only_later_frees() {
    let pool = pool();
    let (begun, has_begun) = mpsc::channel();
    let (done, is_done) = mpsc::channel::<()>();
    let lease = pool.allocate(AllocRequest::new(BLOCKS / 4)).unwrap();
    threads::scope(|scope| {
        let (pool, done) = (&pool, done);
        scope.spawn(move || {
            let batch = pool.begin_batch();
            begun.send(()).unwrap();
            is_done.recv().unwrap_err();
            batch.finish();
        });
        has_begun.recv().unwrap();
        drop(lease);
        let rest = pool.allocate(AllocRequest::new(BLOCKS - BLOCKS / 4)).unwrap();
        assert_eq!(
            pool.allocate(AllocRequest::new(1)).err(),
            Some(AllocError::Exhausted {
                asked: 1,
                free: 0,
                retired: BLOCKS / 4,
                evictable: 0,
                held: 0,
                in_transfer: 0,
                oldest_batch: Some(Ticket(1)),
            })
        );
        pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
        drop(rest);
        drop(done);
    });
    quiescent(&pool, BLOCKS);
}
