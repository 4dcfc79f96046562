//! Model-checks a user's scheduler against the pool, through its public interface alone. Theorem:
//! of two scheduler threads over four blocks, each of which preempts its own sequence when the pool
//! is exhausted, both finish, and all blocks are free at the end; the same holds during a
//! compaction, for which the scheduler's engine copies, and with a request that is awaited.
//!
//! To do the same in a crate of your own, add to `Cargo.toml`:
//!
//! ```toml
//! [target.'cfg(kvpool_loom)'.dependencies]
//! loom = "0.7"
//!
//! [lints.rust]
//! unexpected_cfgs = { level = "warn", check-cfg = ['cfg(kvpool_loom)', 'cfg(crossbeam_loom)'] }
//! ```
//!
//! The scheduler imports its atomics, locks and threads from `std` or, under `cfg(kvpool_loom)`,
//! from `loom`; then
//!
//! ```text
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release --test user_scheduler
//! ```
//!
//! builds the pool on loom's primitives, too. Pools of a model are small and have no storage.
//! loom's `join` returns before a thread's destructors run; code that looks at the whole pool waits
//! for them, as `close` does here.
#![cfg(kvpool_loom)]

use kvpool::{AllocError, SequenceError};
use std::sync::Arc;

use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocRequest, FrameId, Pool, SequenceId};
use kvpool_loom_tests::{check_wide, end_exploring, join_last};
use loom::cell::UnsafeCell;
use loom::future::block_on;
use loom::thread;

fn open(magazine_blocks: usize) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout)
        .blocks(4)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(magazine_blocks)
        .build()
        .unwrap()
}

/// All threads have ended: no block is lost.
fn close(pool: &Pool) {
    close_beside(pool, 0);
}

/// All threads have ended except those that still have a cache, one of which may be the model's
/// own.
fn close_beside(pool: &Pool, own_caches: usize) {
    while pool.thread_caches() > own_caches {
        thread::yield_now();
    }
    pool.audit().unwrap();
    assert_eq!(pool.free_blocks(), 4);
    assert_eq!(pool.sequence_count(), 0);
}

fn is_exhausted(error: AllocError) -> bool {
    matches!(error, AllocError::Exhausted { .. })
}

/// Admits a prompt of `prompt` blocks, decodes into one more, and frees all. Preempts itself when
/// the pool is exhausted. Returns whether it finished.
fn serve(pool: &Pool, prompt: usize) -> bool {
    let mut leases = Vec::new();
    for blocks in [prompt, 1] {
        match pool.allocate(AllocRequest::new(blocks)) {
            Ok(lease) => leases.push(lease),
            Err(error) => {
                assert!(is_exhausted(error), "{error}");
                break;
            }
        }
    }
    let finished = leases.len() == 2;
    // Dropping the leases frees the blocks, also on preemption.
    drop(leases);
    finished
}

fn two_schedulers(magazine_blocks: usize, prompts: [usize; 2]) {
    let pool = open(magazine_blocks);
    let other = pool.clone();
    let thread = thread::spawn(move || serve(&other, prompts[1]));
    let mine = serve(&pool, prompts[0]);
    let theirs = join_last(thread);
    if prompts.iter().sum::<usize>() + 2 <= 4 {
        assert!(mine && theirs, "both requests fit");
    }
    close_beside(&pool, 1);
}

#[test]
fn room_for_both() {
    check_wide(1, "user_scheduler::room_for_both", || two_schedulers(0, [1, 1]));
}

#[test]
fn exhausted() {
    check_wide(1, "user_scheduler::exhausted", || two_schedulers(0, [3, 2]));
}

#[test]
fn with_magazines() {
    check_wide(1, "user_scheduler::with_magazines", || two_schedulers(1, [2, 1]));
}

/// The same with the pool's sequences and batches, which manage the blocks.
fn serve_sequence(pool: &Pool, id: u64, prompt: usize) -> bool {
    let block_tokens = pool.layout().block_tokens();
    let mut sequence = pool.sequence(SequenceId(id)).open().unwrap();
    let mut batch = pool.begin_batch();
    for tokens in [prompt * block_tokens, 1] {
        match batch.append(&mut sequence, tokens) {
            Ok(_) => {}
            // Preempts itself: dropping it frees its blocks.
            Err(SequenceError::Alloc(error)) if is_exhausted(error) => return false,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(sequence.len(), prompt * block_tokens + 1);
    true
}

#[test]
fn with_sequences() {
    check_wide(1, "user_scheduler::with_sequences", || {
        let pool = open(0);
        let threads = [1, 2].map(|prompt| {
            let pool = pool.clone();
            thread::spawn(move || serve_sequence(&pool, prompt as u64, prompt))
        });
        for thread in threads {
            let _ = thread.join().unwrap();
        }
        end_exploring();
        close(&pool);
    });
}

/// An engine's own memory, a cell for each frame, copied as the pool requests.
struct Memory(Vec<UnsafeCell<u32>>);

// SAFETY: no thread writes what another thread uses. The models check exactly this.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn pool() -> (Pool, Arc<Self>) {
        let memory = Arc::new(Self((0..4).map(|_| UnsafeCell::new(0)).collect()));
        let copied = memory.clone();
        let copier = Arc::new(move |moves: &[FrameMove], done: CopyDone| {
            for moved in moves {
                copied.write(moved.dst, copied.read(moved.src));
            }
            done(Ok(()));
        });
        let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(4).without_null_block();
        let pool = builder.segment_blocks(4).magazine_blocks(0).engine_copies(copier).build().unwrap();
        (pool, memory)
    }

    fn read(&self, frame: FrameId) -> u32 {
        // SAFETY: the checker verifies it.
        self.0[frame.index()].with(|bytes| unsafe { *bytes })
    }

    fn write(&self, frame: FrameId, value: u32) {
        // SAFETY: the checker verifies it.
        self.0[frame.index()].with_mut(|bytes| unsafe { *bytes = value });
    }
}

/// The scheduler frees and allocates while another thread compacts: it reads what it wrote.
#[test]
fn beside_a_compaction() {
    check_wide(1, "user_scheduler::beside_a_compaction", || {
        let (pool, memory) = Memory::pool();
        let mut first = pool.allocate(AllocRequest::new(3)).unwrap();
        for (i, frame) in first.frames().enumerate() {
            memory.write(frame, 7 + i as u32);
        }
        first.seal(..);
        let last = first.split_off(2);
        first.truncate(1);
        let frame = || last.frames().next().unwrap();
        let compacted = pool.clone();
        // A compaction exceeds the stack that loom gives a thread in a build with little
        // optimization.
        let thread = thread::Builder::new().stack_size(1 << 15);
        let thread = thread.spawn(move || block_on(compacted.defragment()).unwrap()).unwrap();
        drop(first);
        let batch = pool.begin_batch();
        assert_eq!(memory.read(frame()), 9);
        batch.finish();
        join_last(thread);
        assert_eq!(memory.read(frame()), 9);
        drop(last);
        close_beside(&pool, 1);
    });
}

/// An awaited request gets the blocks that another thread frees.
#[test]
fn awaited() {
    check_wide(1, "user_scheduler::awaited", || {
        let pool = open(0);
        let mut held = pool.allocate_owned(AllocRequest::new(4)).unwrap();
        let freed = held.split_off(2);
        let thread = thread::spawn(move || drop(freed));
        let lease = block_on(pool.allocate_async(AllocRequest::new(2)).into_future()).unwrap();
        join_last(thread);
        assert_eq!((lease.blocks().len(), pool.free_blocks()), (2, 0));
        drop(lease);
        assert_eq!(pool.free_blocks(), 2);
    });
}
