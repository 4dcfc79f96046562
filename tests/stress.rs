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
use kvpool::{AllocError, AllocRequest, BlockHandle, BlockId, Generation, Lease, Pool, Ticket};
use kvpool_testkit::leases::{block, split};
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

    /// Records a lease that the pool handed out: no thread may hold one of its blocks already.
    fn allocated(&self, lease: &Lease<'_>) {
        for id in lease.blocks() {
            let before = self.0[id.index()].fetch_add(1, Relaxed);
            assert_eq!(before, 0, "{id} was handed out while a thread held it");
        }
    }

    fn shared(&self, lease: &Lease<'_>) {
        for id in lease.blocks() {
            let before = self.0[id.index()].fetch_add(1, Relaxed);
            assert_ne!(before, 0, "{id} was shared without a reference");
        }
    }

    /// Drops leases.
    fn free<'p>(&self, leases: impl IntoIterator<Item = Lease<'p>>) {
        for lease in leases {
            for id in lease.blocks() {
                let before = self.0[id.index()].fetch_sub(1, Relaxed);
                assert_ne!(before, 0, "{id} is freed without a reference");
            }
        }
    }
}

/// Allocates every free block from one thread, whatever the others have cached, and frees them
/// again.
fn everything_can_be_got(pool: &Pool) {
    let free = pool.free_blocks();
    let (mut leases, mut got) = (Vec::new(), 0);
    while got < free {
        let ask = 17.min(free - got);
        let lease = pool.allocate(AllocRequest::new(ask));
        leases.push(
            lease.unwrap_or_else(|error| panic!("{got} of {free} free blocks were allocated: {error}")),
        );
        got += ask;
    }
    assert!(matches!(pool.allocate(AllocRequest::new(1)), Err(AllocError::Exhausted { free: 0, .. })));
}

fn quiescent(pool: &Pool, expected_free: usize) {
    assert_eq!(pool.free_blocks(), expected_free);
    pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
    everything_can_be_got(pool);
    pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
    assert_eq!(pool.free_blocks(), expected_free);
}

/// Every thread performs every operation; leases pass between threads through mailboxes.
#[test]
fn threads_mix_everything() {
    let (pool, oracle, seed) = (pool(), Oracle::new(), seed());
    let mailboxes: Vec<Mutex<Vec<Lease<'static>>>> = (0..THREADS).map(|_| Mutex::default()).collect();
    threads::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, oracle, mailboxes) = (&pool, &oracle, &mailboxes);
            scope.spawn(move || mix(pool, oracle, mailboxes, thread, Rng::with_seed(seed ^ thread as u64)));
        }
    });
    oracle.free(mailboxes.into_iter().flat_map(|mailbox| mailbox.into_inner().unwrap()));
    quiescent(&pool, BLOCKS);
}

fn mix(pool: &Pool, oracle: &Oracle, mailboxes: &[Mutex<Vec<Lease<'static>>>], thread: usize, mut rng: Rng) {
    let mut held: Vec<Lease<'static>> = Vec::new();
    let mut batches = Vec::new();
    for _ in 0..steps() {
        match rng.u32(..16) {
            0..5 => {
                let many = if rng.u32(..8) == 0 { 60 } else { 6 };
                let mut request = AllocRequest::new(rng.usize(1..=many));
                request.contiguous = rng.u32(..6) == 0;
                request.pinned = rng.bool();
                if let Ok(lease) = pool.allocate_owned(request) {
                    oracle.allocated(&lease);
                    held.extend(if rng.bool() { split(lease) } else { vec![lease] });
                }
            }
            5..10 => {
                let given = rng.usize(..=held.len().min(40));
                rng.shuffle(&mut held);
                oracle.free(held.split_off(held.len() - given));
            }
            10 if !held.is_empty() => {
                let shared = held[rng.usize(..held.len())].share().unwrap();
                oracle.shared(&shared);
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
                oracle.allocated(&lease);
                if rng.bool() {
                    held.push(lease.into_owned());
                } else {
                    oracle.free([lease]);
                }
            }
            _ => {}
        }
    }
    oracle.free(held);
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
                    if let Ok(lease) = pool.allocate(AllocRequest::new(rng.usize(1..=20))) {
                        oracle.allocated(&lease);
                        held.push(lease);
                    } else {
                        oracle.free(held.split_off(held.len() / 2));
                    }
                }
                oracle.free(held);
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
        let lease = loop {
            match pool.allocate(AllocRequest::new(1)) {
                Ok(lease) => break lease,
                // A reader was stopped in its batch for so long that all other blocks are retired.
                Err(AllocError::Exhausted { retired: 1.., .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        let id = block(&lease);
        stamps[id.index()].store(stamp, Relaxed);
        slot.store(u64::from(id.get()) | stamp << 32, Release);
        lease
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
            old = new;
        }
    });
    drop(old);
    quiescent(&pool, BLOCKS);
}

/// Threads that end while they hold leases and batches: unwinding gives all of them back,
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
                for _ in 0..rng.usize(1..50) {
                    let mut lease = pool.allocate(AllocRequest::new(2)).unwrap();
                    drop(lease.split_off(1));
                }
                match thread % 3 {
                    // These are never freed.
                    0 => {
                        forgotten.fetch_add(10, Relaxed);
                        mem::forget(lease);
                    }
                    1 => {
                        let died = catch_unwind(AssertUnwindSafe(|| {
                            let _batch = pool.begin_batch();
                            let _lease = lease;
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

/// A thread that is stopped forever, with a loaded cache, strands no block.
#[test]
fn a_stopped_thread_strands_no_block() {
    let pool = pool();
    let (loaded, is_loaded) = mpsc::channel();
    // Closed at the end, also by a panic; then the stopped thread ends.
    let (done, is_done) = mpsc::channel::<()>();
    threads::scope(|scope| {
        let (pool, done) = (&pool, done);
        scope.spawn(move || {
            let mut leases = Vec::new();
            for _ in 0..200 {
                leases.push(pool.allocate(AllocRequest::new(1)).unwrap());
                if leases.len() == 40 {
                    leases.clear();
                }
            }
            drop(leases);
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
