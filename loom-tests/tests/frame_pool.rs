//! Theorems: a frame with references stays where it is, also if a lookup takes the first reference
//! while the frame is being moved. A move takes no contents back. A key that was added to a cached
//! frame is found until the frame is evicted or uncached, and never names other contents: not while
//! its frame is evicted and used again, nor while an engine takes its keys away. No key outlives
//! the cached frame. This holds also if an engine adds a key to a frame that another thread frees.
//! A frame that is kept without a key is cached by its last release, and evicted after all reads of
//! its contents. An evictable frame is in the order that is read once its release has ended.
#![cfg(kvpool_loom)]

use kvpool::prefix::HashKey;
use kvpool::{AllocRequest, FrameGroup, FrameId, FrameKey, FramePool};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, conclude, join_last};
use loom::sync::Arc;
use loom::thread;

/// A frame pool with cells that stand for the frames' bytes.
struct Pool {
    pool: FramePool,
    bytes: Arc<TouchedBlocks>,
}

impl Pool {
    fn new(frames: usize) -> Arc<Self> {
        let pool = FramePool::builder(frames).without_null_block().magazine_frames(0).threads(2);
        let pool = pool.segment_frames(8).hash_key(HashKey::from_bytes([7; 32])).build().unwrap();
        let bytes = TouchedBlocks::around(pool.blocks().clone());
        Arc::new(Self { pool, bytes })
    }

    fn key(&self, n: u8) -> FrameKey {
        self.pool.key(FrameGroup(0), &[n]).unwrap()
    }

    fn take(&self) -> Option<u32> {
        let mut out = Vec::new();
        self.pool.allocate(AllocRequest::new(1), &mut out).ok()?;
        self.bytes.write_frame(FrameId(out[0]));
        Some(out[0])
    }

    /// Makes a frame cached under the keys 1 and 2.
    fn keep(&self) -> u32 {
        let frame = self.take().unwrap();
        self.pool.register(&[(frame, self.key(1)), (frame, self.key(2))]).unwrap();
        self.pool.free(&[frame]).unwrap();
        frame
    }

    /// Looks a key up, and reads the frame that it finds.
    fn hit(&self, n: u8) -> Option<u32> {
        let mut out = Vec::new();
        self.pool.hit(&[self.key(n)], &mut out).unwrap();
        let frame = *out.first()?;
        self.bytes.read(self.pool.blocks().block_at(FrameId(frame)));
        Some(frame)
    }

    fn finish(&self) {
        conclude(self.pool.blocks());
        let report = self.pool.audit().unwrap();
        assert_eq!((report.owned, report.held), (0, 0), "{report:?}");
    }
}

/// A frame is looked up while it is moved: it moves before the lookup, or stays.
#[test]
fn a_hit_keeps_a_moving_frame_in_place() {
    check("frame_pool::a_hit_keeps_a_moving_frame_in_place", || {
        let pool = Pool::new(2);
        let from = pool.keep();
        let to = 1 - from;
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            let moves = mover.pool.moves_of([(FrameId(from), FrameId(to))]);
            for (_, to) in moves.pairs() {
                mover.bytes.write_frame(FrameId(to));
            }
            moves.commit().moved.len()
        });
        let frame = pool.hit(1).expect("cached throughout");
        // Its number means the same until it is freed.
        pool.bytes.read(pool.pool.blocks().block_at(FrameId(frame)));
        pool.pool.share(&[frame]).unwrap();
        pool.pool.free(&[frame, frame]).unwrap();
        join_last(thread);
        assert!(pool.hit(2).is_some_and(|frame| pool.pool.free(&[frame]).is_ok()));
        pool.finish();
    });
}

/// A frame gets other contents while its move is committed: it moves before, or stays.
#[test]
fn other_contents_are_not_lost_to_a_move() {
    check("frame_pool::other_contents_are_not_lost_to_a_move", || {
        let pool = Pool::new(2);
        let from = pool.keep();
        let moves = pool.pool.moves_of([(FrameId(from), FrameId(1 - from))]);
        // As many writes as those that the engine copies.
        pool.bytes.write_frame(FrameId(1 - from));
        let thread = thread::spawn(move || moves.commit().moved.len());
        let frame = pool.hit(1).expect("cached throughout");
        pool.pool.uncache(&[frame]).unwrap();
        pool.bytes.write_frame(FrameId(frame));
        pool.pool.register(&[(frame, pool.key(3))]).unwrap();
        pool.pool.free(&[frame]).unwrap();
        join_last(thread);
        let found = pool.hit(3).expect("cached");
        assert_eq!(pool.bytes.read(pool.pool.blocks().block_at(FrameId(found))), 2, "the old contents");
        pool.pool.free(&[found]).unwrap();
        pool.finish();
    });
}

/// A thread needs the only frame while another looks it up by its second key.
#[test]
fn a_further_key_against_eviction() {
    check_to(1, "frame_pool::a_further_key_against_eviction", || {
        let pool = Pool::new(1);
        pool.keep();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let frame = other.take()?;
            other.pool.register(&[(frame, other.key(3))]).unwrap();
            other.pool.free(&[frame]).unwrap();
            Some(frame)
        });
        let found = pool.hit(2);
        found.into_iter().for_each(|frame| pool.pool.free(&[frame]).unwrap());
        let is_evicted = join_last(thread).is_some();
        assert!(is_evicted || found.is_some(), "exactly one thread got it");
        assert_eq!(pool.pool.cached(pool.key(2)).unwrap().is_none(), is_evicted);
        assert_eq!(pool.pool.cached(pool.key(3)).unwrap().is_some(), is_evicted);
        pool.finish();
    });
}

/// An owner takes a frame's keys away while another thread looks it up and frees it.
#[test]
fn a_further_key_against_uncache() {
    check("frame_pool::a_further_key_against_uncache", || {
        let pool = Pool::new(1);
        let frame = pool.keep();
        pool.pool.share(&[frame]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            assert_eq!(other.pool.uncache(&[frame]), Ok(1));
            other.pool.free(&[frame]).unwrap();
        });
        if let Some(found) = pool.hit(2) {
            assert_eq!(found, frame);
            pool.pool.free(&[found]).unwrap();
        }
        join_last(thread);
        assert_eq!(pool.pool.cached(pool.key(2)), Ok(None));
        pool.finish();
    });
}

/// A key is added to a frame while another thread looks it up by it, and frees it.
#[test]
fn a_key_is_found_once_it_was_added() {
    check("frame_pool::a_key_is_found_once_it_was_added", || {
        let pool = Pool::new(1);
        let frame = pool.keep();
        pool.pool.share(&[frame]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.pool.register(&[(frame, other.key(3))]).unwrap();
            assert_eq!(other.pool.unregister(other.key(1)), Ok(1));
            other.pool.free(&[frame]).unwrap();
        });
        let found = pool.hit(3);
        found.into_iter().for_each(|found| pool.pool.free(&[found]).unwrap());
        join_last(thread);
        assert_eq!(pool.pool.cached(pool.key(3)), Ok(Some(frame)));
        assert_eq!(pool.pool.cached(pool.key(1)), Ok(None));
        pool.finish();
    });
}

/// A key is added to a frame that another thread frees and needs again, against the engine's rule.
#[test]
fn a_key_added_to_a_freed_frame_ends_with_it() {
    check("frame_pool::a_key_added_to_a_freed_frame_ends_with_it", || {
        let pool = Pool::new(1);
        let frame = pool.take().unwrap();
        pool.pool.register(&[(frame, pool.key(1))]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.pool.free(&[frame]).unwrap();
            let frame = other.take().expect("evicts it");
            other.pool.free(&[frame]).unwrap();
        });
        // Refused, added to the contents that are evicted then, or to the new ones.
        let _ = pool.pool.register(&[(frame, pool.key(3))]);
        join_last(thread);
        assert_eq!(pool.pool.cached(pool.key(1)), Ok(None), "evicted");
        pool.finish();
    });
}

/// A key is added to a frame while another thread looks it up by a key that it had: that thread
/// reads the old list of keys or the new one.
#[test]
fn a_list_of_keys_is_read_while_it_is_replaced() {
    check_to(2, "frame_pool::a_list_of_keys_is_read_while_it_is_replaced", || {
        let pool = Pool::new(1);
        let frame = pool.keep();
        pool.pool.share(&[frame]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.pool.register(&[(frame, other.key(3))]).unwrap());
        assert_eq!(pool.pool.cached(pool.key(2)), Ok(Some(frame)));
        join_last(thread);
        pool.pool.free(&[frame]).unwrap();
        pool.finish();
    });
}

/// A frame is kept without a key while another thread shares it, reads it and frees it: it is
/// cached by the last of them, and its next contents are written after both.
#[test]
fn kept_while_it_is_shared() {
    check("frame_pool::kept_while_it_is_shared", || {
        let pool = Pool::new(1);
        let frame = pool.take().unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.pool.share(&[frame]).expect("owned or cached");
            other.bytes.read(other.pool.blocks().block_at(FrameId(frame)));
            other.pool.free(&[frame]).unwrap();
        });
        pool.pool.keep(&[frame]).unwrap();
        join_last(thread);
        assert_eq!((pool.pool.counts().evictable, pool.pool.counts().free()), (1, 0));
        assert_eq!(pool.take(), Some(frame), "evicted");
        pool.pool.free(&[frame]).unwrap();
        pool.finish();
    });
}

/// A frame is kept while another thread needs it: that thread is refused, or evicts it.
#[test]
fn kept_while_it_is_needed() {
    check_to(1, "frame_pool::kept_while_it_is_needed", || {
        let pool = Pool::new(1);
        let frame = pool.take().unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.take().map(|frame| other.pool.keep(&[frame]).unwrap()));
        pool.pool.keep(&[frame]).unwrap();
        join_last(thread);
        assert_eq!((pool.pool.counts().evictable, pool.pool.counts().free()), (1, 0));
        assert_eq!(pool.take(), Some(frame), "evicted");
        pool.pool.free(&[frame]).unwrap();
        pool.finish();
    });
}

/// The order is read for the first time while frames are released, hit and evicted: it has each
/// frame once, and afterwards all that are evictable.
#[test]
fn released_beside_the_first_read() {
    check("frame_pool::released_beside_the_first_read", || {
        let pool = Pool::new(2);
        let first = pool.keep();
        let second = pool.take().unwrap();
        pool.pool.register(&[(second, pool.key(3))]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.pool.free(&[second]).unwrap();
            if let Some(hit) = other.hit(1) {
                other.pool.free(&[hit]).unwrap();
            }
        });
        let order = || {
            let mut order = Vec::new();
            pool.pool.available_after(None, 9, &mut order).unwrap();
            order
        };
        let during = order();
        assert!(during.len() <= 2 && during.first() != during.get(1), "{during:?}");
        thread.join().unwrap();
        assert_eq!(order(), [second, first], "released in this order");
        pool.finish();
    });
}
