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
use kvpool::pool::Pool;
use kvpool::storage::KvLayout;
use kvpool_loom_tests::check;
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

/// Admits a sequence of `prompt` blocks and decodes into one more. Preempted once, it asks once more for what it needs.
/// True if it finished.
fn serve(pool: &Pool, id: u64, prompt: usize) -> bool {
    let block_tokens = pool.layout().block_tokens();
    let exhausted = |error: SequenceError| match error {
        SequenceError::Alloc(AllocError::Exhausted { .. }) => {}
        other => panic!("{other}"),
    };
    let mut sequence = pool.sequence(SequenceId(id)).open().unwrap();
    for tokens in [prompt * block_tokens, 1] {
        let mut batch = pool.begin_batch();
        if let Err(error) = batch.append(&mut sequence, tokens) {
            exhausted(error);
            // Preempts itself: its blocks go back with it.
            return false;
        }
    }
    assert_eq!(sequence.len(), prompt * block_tokens + 1);
    true
}

fn two_schedulers(magazine_blocks: usize, prompts: [usize; 2]) {
    let pool = open(magazine_blocks);
    let other = pool.clone();
    let thread = thread::spawn(move || serve(&other, 1, prompts[1]));
    let second = pool.clone();
    let mine = thread::spawn(move || serve(&second, 2, prompts[0])).join().unwrap();
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
    check("user_scheduler::exhausted", || two_schedulers(0, [2, 3]));
}

#[test]
fn with_magazines() {
    check("user_scheduler::with_magazines", || two_schedulers(1, [1, 2]));
}
