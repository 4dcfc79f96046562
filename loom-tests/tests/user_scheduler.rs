//! A user's scheduler, model-checked against the pool through its public interface alone. Theorem: two scheduler threads
//! over four blocks, each of which gives its own sequence up when the pool is exhausted, both finish, and all blocks
//! are free at the end.
//!
//! How a crate of its own does the same. `Cargo.toml`:
//!
//! ```toml
//! [target.'cfg(kvpool_loom)'.dependencies]
//! loom = "0.7"
//!
//! [lints.rust]
//! unexpected_cfgs = { level = "warn", check-cfg = ['cfg(kvpool_loom)', 'cfg(crossbeam_loom)'] }
//! ```
//!
//! The scheduler takes its atomics, locks and threads from `std` or, under `cfg(kvpool_loom)`, from `loom`; then
//!
//! ```text
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release --test user_scheduler
//! ```
//!
//! builds the pool on loom's primitives, too. Pools of a model are small and have no storage. loom's `join` returns
//! before a thread's destructors run; what looks at the whole pool waits for them, as `close` does here.
#![cfg(kvpool_loom)]

use kvpool::error::{AllocError, SequenceError};
use kvpool::ids::SequenceId;
use kvpool::pool::{AllocRequest, Pool};
use kvpool::storage::KvLayout;
use kvpool_loom_tests::{check, check_to};
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

/// All threads have left: nothing is lost.
fn close(pool: &Pool) {
    while pool.blocks().residents() > 0 {
        thread::yield_now();
    }
    pool.audit().unwrap();
    assert_eq!(pool.free_blocks(), 4);
    assert_eq!(pool.sequence_count(), 0);
}

fn is_exhausted(error: AllocError) -> bool {
    matches!(error, AllocError::Exhausted { .. })
}

/// Admits a prompt of so many blocks, decodes into one more, and frees all. Preempts itself when the pool is exhausted.
/// True if it finished.
fn serve(pool: &Pool, prompt: usize) -> bool {
    let cache = pool.handle();
    let mut leases = Vec::new();
    for blocks in [prompt, 1] {
        match cache.allocate(AllocRequest::new(blocks)) {
            Ok(lease) => leases.push(lease),
            Err(error) => {
                assert!(is_exhausted(error), "{error}");
                break;
            }
        }
    }
    let finished = leases.len() == 2;
    // What it holds goes back, also if it is preempted.
    leases.into_iter().for_each(|lease| cache.release(lease));
    finished
}

fn two_schedulers(magazine_blocks: usize, prompts: [usize; 2]) {
    let pool = open(magazine_blocks);
    let other = pool.clone();
    let thread = thread::spawn(move || serve(&other, prompts[1]));
    let mine = serve(&pool, prompts[0]);
    let theirs = thread.join().unwrap();
    if prompts.iter().sum::<usize>() + 2 <= 4 {
        assert!(mine && theirs, "there was room for both");
    }
    close(&pool);
}

#[test]
fn room_for_both() {
    check("user_scheduler::room_for_both", || two_schedulers(0, [1, 1]));
}

#[test]
fn exhausted() {
    check("user_scheduler::exhausted", || two_schedulers(0, [3, 2]));
}

#[test]
fn with_magazines() {
    check("user_scheduler::with_magazines", || two_schedulers(1, [2, 1]));
}

/// The same with the pool's sequences and batches, which keep the books.
fn serve_sequence(pool: &Pool, id: u64, prompt: usize) -> bool {
    let block_tokens = pool.layout().block_tokens();
    let mut sequence = pool.sequence(SequenceId(id)).open().unwrap();
    let mut batch = pool.begin_batch();
    for tokens in [prompt * block_tokens, 1] {
        match batch.append(&mut sequence, tokens) {
            Ok(_) => {}
            // Preempts itself: its blocks go back with it.
            Err(SequenceError::Alloc(error)) if is_exhausted(error) => return false,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(sequence.len(), prompt * block_tokens + 1);
    true
}

#[test]
fn with_sequences() {
    check_to(1, "user_scheduler::with_sequences", || {
        let pool = open(0);
        let threads = [1, 2].map(|prompt| {
            let pool = pool.clone();
            thread::spawn(move || serve_sequence(&pool, prompt as u64, prompt))
        });
        for thread in threads {
            let _ = thread.join().unwrap();
        }
        close(&pool);
    });
}
