//! Theorems: exactly one of the threads that compete for a cached block without an owner gets it:
//! one that looks it up shares it with its bytes intact, or one that needs a frame gets the frame
//! exclusively. A batch that may still read the frame never sees it overwritten. A look-up never
//! returns a block with other bytes than requested. And an allocation can obtain every evictable
//! block, wherever the threads that released it are.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool::block::MoveCancelled;
use kvpool::prefix::models;
use kvpool_loom_tests::{CachedBlocks, check, check_to, end_exploring, join_last};
use loom::thread;

/// The last owner releases a block while another thread looks it up.
#[test]
fn hit_against_the_last_release() {
    check("evictable::hit_against_the_last_release", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let owner = pool.clone();
        let thread = thread::spawn(move || owner.leave(block));
        let found = pool.hit(1).expect("cached throughout");
        assert_eq!((found, pool.read(found)), (block, 1));
        pool.leave(found);
        join_last(thread);
        pool.finish();
    });
}

/// A thread needs the only frame while another looks the block up.
#[test]
fn hit_against_eviction() {
    check("evictable::hit_against_eviction", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        let found = pool.hit(1);
        if let Some(found) = found {
            assert_eq!(pool.read(found), 1);
            pool.leave(found);
        }
        assert!(join_last(thread) || found.is_some(), "exactly one thread got it");
        pool.finish();
    });
}

/// A hit, its release, and an eviction race with a block that is already enqueued: the other block
/// is available for eviction.
#[test]
fn hit_and_release_against_eviction() {
    check("evictable::hit_and_release_against_eviction", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || assert!(other.evict(), "one of two is not in use"));
        if let Some(found) = pool.hit(1) {
            assert_eq!(pool.read(found), 1);
            pool.leave(found);
        }
        join_last(thread);
        pool.finish();
    });
}

/// A block enqueued by an old entry is released while another thread pops that entry: it is still
/// in a queue afterwards. (The walk over all words, which comes last before a request is refused,
/// would find it in any case.)
#[test]
fn released_while_its_entry_is_taken() {
    check_to(3, "evictable::released_while_its_entry_is_taken", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let found = pool.hit(1).expect("no thread needs its frame");
        let owner = pool.clone();
        let thread = thread::spawn(move || owner.leave(found));
        let evicted = pool.evict();
        join_last(thread);
        assert!(evicted || pool.evict(), "evictable, but in no queue");
        pool.finish();
    });
}

/// Two threads need a frame each, and there are two.
#[test]
fn evictions_meet() {
    check("evictable::evictions_meet", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || assert!(other.evict(), "two blocks for two threads"));
        assert!(pool.evict(), "two blocks for two threads");
        join_last(thread);
        pool.finish();
    });
}

/// A block is registered and released while another thread evicts.
#[test]
fn registration_against_eviction() {
    check("evictable::registration_against_eviction", || {
        let pool = CachedBlocks::new(1);
        let block = pool.take_listed().unwrap();
        let evictor = pool.clone();
        let thread = thread::spawn(move || evictor.evict());
        pool.register(block, 1);
        pool.leave(block);
        let evicted = join_last(thread);
        let found = pool.hit(1);
        assert_eq!(found.is_some(), !evicted);
        found.into_iter().for_each(|found| pool.leave(found));
        pool.finish();
    });
}

/// A block is registered and released while another thread looks it up.
#[test]
fn registration_against_hit() {
    check("evictable::registration_against_hit", || {
        let pool = CachedBlocks::new(1);
        let block = pool.take_listed().unwrap();
        let reader = pool.clone();
        let thread = thread::spawn(move || {
            if let Some(found) = reader.hit(1) {
                assert_eq!(reader.read(found), 1);
                reader.leave(found);
            }
        });
        pool.register(block, 1);
        pool.leave(block);
        join_last(thread);
        assert_eq!(pool.hit(1).inspect(|&found| pool.leave(found)), Some(block), "not lost");
        pool.finish();
    });
}

/// A block is evicted, filled with other tokens and cached again while another thread looks up the
/// old tokens.
#[test]
fn a_hit_has_the_requested_tokens() {
    check("evictable::a_hit_has_the_requested_tokens", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.replace().inspect(|&block| other.register(block, 2)));
        let found = pool.hit(1);
        if let Some(found) = found {
            assert_eq!(pool.read(found), 1, "the bytes of other tokens");
        }
        let block = join_last(thread);
        assert!(found.is_none() || block.is_none(), "exactly one thread got it");
        found.into_iter().chain(block).for_each(|block| pool.leave(block));
        pool.finish();
    });
}

/// A batch reads a block in the frame that its table names, while the owner releases the block and
/// another thread needs the frame.
#[test]
fn read_from_a_table() {
    check("evictable::read_from_a_table", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let batch = pool.blocks.clock().begin();
        let table = pool.frame(block);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.leave(block);
            other.evict();
        });
        assert_eq!(pool.read_frame(table), 1, "the bytes of another owner");
        pool.blocks.end_batch(batch);
        join_last(thread);
        pool.finish();
    });
}

/// The block is hit and released once more under a batch that began in between, which outdates the
/// ticket noted at its first release.
#[test]
fn read_from_a_later_table() {
    check("evictable::read_from_a_later_table", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let reader = pool.clone();
        let thread = thread::spawn(move || {
            let Some(block) = reader.hit(1) else { return };
            let batch = reader.blocks.clock().begin();
            let table = reader.frame(block);
            reader.leave(block);
            assert_eq!(reader.read_frame(table), 1, "the bytes of another owner");
            reader.blocks.end_batch(batch);
        });
        pool.evict();
        join_last(thread);
        pool.finish();
    });
}

/// The cache learns late of a release: meanwhile the block is hit, read under a batch, and released
/// again.
#[test]
fn read_after_a_release_that_is_told_late() {
    check_to(1, "evictable::read_after_a_release_that_is_told_late", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let (owner, reader) = (pool.clone(), pool.clone());
        let threads = [
            thread::spawn(move || owner.leave(block)),
            thread::spawn(move || {
                let Some(block) = reader.hit(1) else { return };
                let batch = reader.blocks.clock().begin();
                let table = reader.frame(block);
                reader.leave(block);
                assert_eq!(reader.read_frame(table), 1, "the bytes of another owner");
                reader.blocks.end_batch(batch);
            }),
        ];
        pool.evict();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        end_exploring();
        pool.finish();
    });
}

/// An evictable block is moved while another thread looks it up, reads it and releases it again.
#[test]
fn moved_against_hit() {
    check("evictable::moved_against_hit", || {
        let pool = CachedBlocks::new(2);
        let block = pool.keep(1);
        let mover = pool.clone();
        let (here, there) = (block.0, 1 - block.0);
        let thread = thread::spawn(move || mover.relocate(here, there));
        let found = pool.hit(1).expect("cached throughout");
        assert_eq!(pool.read(found), 1);
        pool.leave(found);
        assert_eq!(join_last(thread), Ok(()), "neither a hit nor a release cancels a move");
        assert_eq!(pool.frame(block).0, there);
        pool.finish();
    });
}

/// An evictable block is moved while another thread needs every frame.
#[test]
fn moved_against_eviction() {
    check("evictable::moved_against_eviction", || {
        let pool = CachedBlocks::new(2);
        let block = pool.keep(1);
        let mover = pool.clone();
        let (here, there) = (block.0, 1 - block.0);
        let thread = thread::spawn(move || {
            let _ = mover.relocate(here, there);
        });
        pool.evict();
        if let Some(ids) = pool.take(1) {
            pool.put(&ids);
        }
        join_last(thread);
        pool.finish();
    });
}

/// A block moves to the frame of an evictable one while another thread hits that, reads it under a
/// batch, and releases it: the frame is not written before the batch has ended.
#[test]
fn dropped_for_a_move() {
    check("evictable::dropped_for_a_move", || {
        let pool = CachedBlocks::new(2);
        let (moved, dropped) = (pool.fill(1), pool.keep(2));
        let (from, to) = (pool.blocks.frame(moved), pool.blocks.frame(dropped));
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(from.0, to.0));
        let batch = pool.blocks.clock().begin();
        if let Some(block) = pool.hit(2) {
            assert_eq!(block, dropped);
            pool.leave(block);
            pool.read_frame(to);
        }
        pool.blocks.end_batch(batch);
        let outcome = join_last(thread);
        assert!(matches!(outcome, Ok(()) | Err(MoveCancelled::Taken)), "{outcome:?}");
        let is_moved = pool.blocks.frame(moved) == to;
        assert_eq!(
            (is_moved, pool.hit(2).map(|block| pool.leave(block))),
            match outcome {
                Ok(()) => (true, None),
                Err(_) => (false, Some(())),
            }
        );
        pool.leave(moved);
        pool.finish();
    });
}

/// The cache is cleared while a block is moved, and while its last owner releases it.
#[test]
fn cleared() {
    check("evictable::cleared", || {
        let pool = CachedBlocks::new(2);
        let block = pool.fill(1);
        let (mover, owner) = (pool.clone(), pool.clone());
        let (here, there) = (block.0, 1 - block.0);
        let threads = [
            thread::spawn(move || {
                let _ = mover.relocate(here, there);
            }),
            thread::spawn(move || owner.leave(block)),
        ];
        models::clear(&pool.cache);
        assert_eq!(pool.hit(1), None, "not in the cache any more, in whatever state the block is");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        end_exploring();
        pool.finish();
    });
}

/// A block that was taken to be copied to another pool is given up while another thread looks it
/// up, reads it under a batch, and releases it; if it was evicted, its frame is written at once.
#[test]
fn given_up_against_a_later_table() {
    check("evictable::given_up_against_a_later_table", || {
        let pool = CachedBlocks::new(1);
        let block = pool.keep(1);
        let taken = models::take_coldest(&pool.cache, &pool.blocks, 1);
        assert_eq!((taken.blocks(), pool.read(block)), (vec![block], 1));
        let reader = pool.clone();
        let thread = thread::spawn(move || {
            let Some(block) = reader.hit(1) else { return };
            let batch = reader.blocks.clock().begin();
            let table = reader.frame(block);
            reader.leave(block);
            assert_eq!(reader.read_frame(table), 1, "the bytes of another owner");
            reader.blocks.end_batch(batch);
        });
        if taken.give_up(&pool.cache, &pool.blocks) > 0 {
            pool.write_frame(FrameId(0));
        }
        join_last(thread);
        pool.finish();
    });
}

/// Blocks are taken and put back while another thread needs a frame: of two evictable blocks it
/// gets one that was not taken, or one that was put back.
#[test]
fn put_back_against_eviction() {
    check("evictable::put_back_against_eviction", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || assert!(other.evict(), "one of two is not taken"));
        let taken = models::take_coldest(&pool.cache, &pool.blocks, 1);
        taken.blocks().into_iter().for_each(|block| assert_ne!(pool.read(block), 0));
        taken.put_back(&pool.cache, &pool.blocks);
        join_last(thread);
        pool.finish();
    });
}

/// A block is demoted while another thread hits it: the hit has its tokens, and nothing is lost.
#[test]
fn demoted_against_hit() {
    check("evictable::demoted_against_hit", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.demote(1));
        let found = pool.hit(1).expect("cached throughout");
        assert_eq!(pool.read(found), 1);
        pool.leave(found);
        join_last(thread);
        pool.finish();
    });
}

/// A block is demoted while another thread needs a frame: it gets that block, or the other one.
#[test]
fn demoted_against_eviction() {
    check("evictable::demoted_against_eviction", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || assert!(other.evict(), "one of two is not held"));
        pool.demote(1);
        join_last(thread);
        pool.finish();
    });
}

/// Two threads demote a block, which is then in two runs, of which one counts.
#[test]
fn demoted_twice() {
    check("evictable::demoted_twice", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.demote(1);
            other.demote(2);
        });
        pool.demote(1);
        join_last(thread);
        pool.finish();
    });
}

/// A hint retains a block while another thread hits and releases it: it is in the policy's queue,
/// or in a run.
#[test]
fn retained_against_a_hit() {
    check("evictable::retained_against_a_hit", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.retain(&[1], true));
        let found = pool.hit(1).expect("cached throughout");
        assert_eq!(pool.read(found), 1);
        pool.leave(found);
        join_last(thread);
        pool.finish_in_order(1);
    });
}

/// One thread retains a block, another one demotes it: the last place counts, and one run has it.
#[test]
fn two_places_of_one_block() {
    check("evictable::two_places_of_one_block", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.retain(&[1], true));
        pool.demote(1);
        join_last(thread);
        pool.finish_in_order(1);
    });
}

/// A thread evicts one block of a run of two while another one hits and releases the other: the
/// rest of the run is not lost.
#[test]
fn a_run_against_a_hit() {
    check_to(1, "evictable::a_run_against_a_hit", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        pool.retain(&[1, 2], true);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        // The first one of the run.
        if let Some(found) = pool.hit(2) {
            pool.leave(found);
        }
        let evicted = usize::from(join_last(thread));
        pool.finish_in_order(2 - evicted);
    });
}

/// An eviction ends the retention of a block while another thread hits and releases it.
#[test]
fn the_end_of_retention_against_a_hit() {
    check_to(1, "evictable::the_end_of_retention_against_a_hit", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        pool.retain(&[1], true);
        // Its entry in the policy's queue is used up with the other block's.
        assert!(pool.evict());
        pool.keep(2);
        pool.retain(&[1], false);
        let other = pool.clone();
        let thread = thread::spawn(move || assert!(other.evict(), "one of two is not held"));
        if let Some(found) = pool.hit(1) {
            assert_eq!(pool.read(found), 1);
            pool.leave(found);
        }
        join_last(thread);
        pool.finish_in_order(1);
    });
}

/// A block that an entry still names by an earlier rank is evicted from a run and filled again while
/// another thread takes that entry: it is enqueued again, by its new rank.
#[test]
fn filled_again_under_a_stale_entry() {
    check_to(2, "evictable::filled_again_under_a_stale_entry", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        pool.demote(1);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let Some(block) = other.replace() else { return };
            other.register(block, 2);
            other.leave(block);
        });
        let evicted = usize::from(pool.evict());
        join_last(thread);
        pool.finish_in_order(1 - evicted);
    });
}

/// A duplicate is released, and passes its place on, while another thread evicts: of both blocks it
/// gets one, and the other is found if it is the original.
#[test]
fn a_duplicate_is_released_against_eviction() {
    check("evictable::a_duplicate_is_released_against_eviction", || {
        let pool = CachedBlocks::new(2);
        let (original, duplicate) = (pool.fill(1), pool.fill(1));
        assert!(original < duplicate);
        pool.leave(original);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        pool.leave(duplicate);
        join_last(thread);
        assert!(pool.hit(1).is_some_and(|found| pool.read(found) == 1), "one of two was evicted");
        pool.blocks.audit().unwrap();
    });
}

/// A block is uncached by its hash while another thread evicts it and caches other tokens there:
/// those stay.
#[test]
fn uncached_against_other_contents() {
    check_to(3, "evictable::uncached_against_other_contents", || {
        let pool = CachedBlocks::new(1);
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let Some(block) = other.replace() else { return false };
            other.register(block, 2);
            other.leave(block);
            true
        });
        let uncached = models::uncache(&pool.cache, &pool.blocks, CachedBlocks::hash(1));
        let evicted = uncached.evicted_blocks > 0;
        let replaced = join_last(thread);
        assert!(evicted != replaced, "one of them got the block");
        assert_eq!(pool.hit(2).inspect(|&block| pool.leave(block)).is_some(), replaced);
        pool.finish();
    });
}

/// A block that arrived is marked as a duplicate while another thread evicts it and caches there
/// what it computed: that has no checksum, and is not taken for damaged.
#[test]
fn marked_as_a_duplicate_against_other_contents() {
    check_to(2, "evictable::marked_as_a_duplicate_against_other_contents", || {
        let pool = CachedBlocks::new(2);
        let (block, arrived) = (pool.take_listed().unwrap(), pool.take_listed().unwrap());
        assert!(block < arrived, "the larger number is the duplicate");
        pool.arrive(arrived, 1, 5);
        assert_eq!(pool.sum(arrived), Some(5));
        pool.leave(arrived);
        let other = pool.clone();
        let thread = thread::spawn(move || other.register(block, 1));
        let computed = pool.replace().expect("one is evictable");
        pool.register(computed, 2);
        join_last(thread);
        assert_eq!((computed, pool.sum(computed)), (arrived, None), "of the former contents");
        pool.leave(computed);
        pool.leave(block);
        pool.finish();
    });
}
