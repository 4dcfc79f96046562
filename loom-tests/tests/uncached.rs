//! Theorem: once a call that uncaches a hash has returned, no lookup finds a block that was written
//! before it, whichever threads hit, released, registered or took back the note of the block
//! meanwhile; nor one that was computed from it and was not cached when the call returned. No owner
//! loses its bytes, and no block is lost. And a sequence that hit the block during the call sees a
//! newer call afterwards.
#![cfg(kvpool_loom)]

use kvpool::BlockId;
use kvpool::prefix::models;
use kvpool_loom_tests::{CachedBlocks, check, check_to, join_last};
use loom::thread;

fn uncache(pool: &CachedBlocks) {
    models::uncache(&pool.cache, &pool.blocks, CachedBlocks::hash(1));
    assert_eq!(pool.hit(1), None, "found after the call");
}

/// Writes a block before the call, to be registered under the first hash.
fn written(pool: &CachedBlocks) -> (BlockId, u64) {
    let (block, since) = (pool.take_listed().unwrap(), models::newest_uncached(&pool.cache));
    models::note(&pool.cache, block, CachedBlocks::hash(1));
    (block, since)
}

fn register(pool: &CachedBlocks, block: BlockId, since: u64) {
    models::register_since(&pool.cache, &pool.blocks, since, pool.blocks.handle(block));
}

/// A batch ends that was about to register the block.
#[test]
fn against_the_end_of_a_batch() {
    check("uncached::against_the_end_of_a_batch", || {
        let pool = CachedBlocks::new(1);
        let (block, since) = written(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || register(&other, block, since));
        uncache(&pool);
        join_last(thread);
        assert_eq!(pool.hit(1), None, "registered after the call");
        assert_eq!(pool.read(block), 1);
        pool.leave(block);
        pool.finish();
    });
}

/// As above, of a block and one that was computed from it.
#[test]
fn against_the_end_of_a_batch_with_a_chain() {
    check("uncached::against_the_end_of_a_batch_with_a_chain", || {
        let pool = CachedBlocks::new(2);
        let (first, since) = written(&pool);
        let second = pool.take_listed().unwrap();
        models::note(&pool.cache, second, CachedBlocks::hash(2));
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let chain = [first, second].map(|id| other.blocks.handle(id));
            models::register_chain(&other.cache, &other.blocks, since, &chain);
        });
        uncache(&pool);
        let was_cached = pool.blocks.word(second).is_cached();
        join_last(thread);
        assert_eq!(pool.hit(1), None, "registered after the call");
        if let Some(found) = pool.hit(2) {
            assert!(was_cached, "what was computed from it was registered after the call");
            pool.leave(found);
        }
        pool.leave_all(&[second, first]);
        pool.finish();
    });
}

/// As the first, of a block whose sequence is closed meanwhile.
#[test]
fn against_the_end_of_a_batch_and_a_release() {
    check("uncached::against_the_end_of_a_batch_and_a_release", || {
        let pool = CachedBlocks::new(1);
        let (block, since) = written(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            register(&other, block, since);
            other.leave(block);
        });
        uncache(&pool);
        join_last(thread);
        assert_eq!(pool.hit(1), None, "registered after the call");
        pool.finish();
    });
}

/// A lookup takes the block, with its bytes, or does not find it; it knows that there was a call.
#[test]
fn against_hit() {
    check("uncached::against_hit", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let reader = pool.clone();
        let thread = thread::spawn(move || {
            let looked = models::newest_uncached(&reader.cache);
            let found = reader.hit(1);
            if let Some(found) = found {
                assert_eq!(reader.read(found), 1);
            }
            found.map(|found| (found, looked))
        });
        uncache(&pool);
        if let Some((found, looked)) = join_last(thread) {
            assert_ne!(models::newest_uncached(&pool.cache), looked, "the sequence sees no call");
            assert_eq!((pool.hit(1), pool.read(found)), (None, 1));
            pool.leave(found);
        }
        pool.finish();
    });
}

/// The last owner releases the block.
#[test]
fn against_the_last_release() {
    check("uncached::against_the_last_release", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let owner = pool.clone();
        let thread = thread::spawn(move || owner.leave(block));
        uncache(&pool);
        join_last(thread);
        assert_eq!(pool.hit(1), None);
        pool.finish();
    });
}

/// A sequence takes the note of the block back while a batch ends that registers it.
#[test]
fn against_a_note_that_is_taken_back() {
    check_to(2, "uncached::against_a_note_that_is_taken_back", || {
        let pool = CachedBlocks::new(1);
        let (block, since) = written(&pool);
        let (batch, owner) = (pool.clone(), pool.clone());
        let batch = thread::spawn(move || register(&batch, block, since));
        let owner = thread::spawn(move || models::unnote(&owner.cache, &owner.blocks, block));
        models::uncache(&pool.cache, &pool.blocks, CachedBlocks::hash(1));
        batch.join().unwrap();
        join_last(owner);
        assert_eq!(pool.hit(1), None, "found by the restored note");
        pool.leave(block);
        pool.finish();
    });
}
