//! Theorem: a registered block whose insertion has returned is found, unless it was counted as
//! forgotten: during other insertions, delayed removals from an earlier life of the block,
//! replacements, and growth. A valid entry is never replaced. A thread that finds a block sees its
//! registration. And a stopped grower stops no other thread.
//!
//! A bucket has two entries here, and the words are plain atomics that say under which key, if any,
//! a block is registered. Not covered: what the finder does with the word, which the models of
//! sharing cover.
#![cfg(kvpool_loom)]

use std::ops::ControlFlow;

use kvpool::BlockId;
use kvpool::prefix::{Index, Inserted, Key};
use kvpool_loom_tests::{check, check_to};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use loom::thread;

const BLOCKS: usize = 5;

/// An index, and the words of a few blocks.
struct Cached {
    index: Index,
    words: [AtomicU64; BLOCKS],
}

/// Keys with different fingerprints. In an index of one bucket all keys collide.
fn key(number: u64) -> Key {
    Key(number, number << 40 | number)
}

impl Cached {
    /// Creates an index with room for the entries of `blocks`, two for each.
    fn new(blocks: usize) -> Arc<Self> {
        Arc::new(Self { index: Index::new(blocks), words: std::array::from_fn(|_| AtomicU64::new(0)) })
    }

    fn registered(&self, id: BlockId) -> Option<Key> {
        let number = self.words[id.index()].load(Acquire);
        (number != 0).then(|| key(number))
    }

    /// The owner's steps when a block is full: register it, and insert it into the index.
    fn insert(&self, number: u64, id: u32) -> Inserted {
        self.register(number, id);
        self.index.insert(key(number), BlockId(id), |id| self.registered(id))
    }

    /// The same, whether or not the insertion finds room.
    fn put(&self, number: u64, id: u32) {
        let _ = self.insert(number, id);
    }

    /// Registers the block: only the word.
    fn register(&self, number: u64, id: u32) {
        self.words[id as usize].store(number, Release);
    }

    /// The evictor's steps. The block may have another owner before the second step.
    fn evict(&self, number: u64, id: u32) {
        self.words[id as usize].store(0, Release);
        self.unlink(number, id);
    }

    /// The evictor's second step alone.
    fn unlink(&self, number: u64, id: u32) {
        self.index.remove(key(number), BlockId(id), |id| self.registered(id));
    }

    /// Creates a larger table, and fills it with the registered blocks.
    fn grow(&self, blocks: usize) {
        self.index.grow(blocks, |add| self.walk(add));
    }

    fn walk(&self, add: &mut dyn FnMut(Key, BlockId)) {
        for id in (1..BLOCKS as u32).map(BlockId) {
            if let Some(key) = self.registered(id) {
                add(key, id);
            }
        }
    }

    fn finds(&self, number: u64, id: u32) -> bool {
        let look =
            |found| if found == BlockId(id) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        self.index.find(key(number), look).is_some()
    }

    /// Counts the registered blocks that are not found.
    fn lost(&self) -> u64 {
        let is_lost = |id: &u32| {
            let number = self.words[*id as usize].load(Acquire);
            number != 0 && !self.finds(number, *id)
        };
        (1..BLOCKS as u32).filter(is_lost).count() as u64
    }

    /// Ends a model in which there is room for every entry.
    fn nothing_is_lost(&self) {
        assert_eq!((self.lost(), self.index.forgotten()), (0, 0), "a registered block is not found");
    }
}

/// Runs two threads, then the end. It does so twice, with either thread as the first for the
/// checker, which does not play a load against a later change by a thread that loaded the same
/// atomic before.
fn beside(
    name: &str,
    preemptions: usize,
    begin: impl Fn() -> Arc<Cached> + Send + Sync + Copy + 'static,
    one: impl Fn(&Cached) + Send + Sync + Copy + 'static,
    two: impl Fn(&Cached) + Send + Sync + Copy + 'static,
    end: impl Fn(&Cached) + Send + Sync + Copy + 'static,
) {
    let run = move |is_one_first: bool| {
        let cached = begin();
        let other = cached.clone();
        let thread = thread::spawn(move || if is_one_first { two(&other) } else { one(&other) });
        if is_one_first {
            one(&cached)
        } else {
            two(&cached)
        }
        thread.join().unwrap();
        end(&cached);
    };
    check_to(preemptions, name, move || run(true));
    check_to(preemptions, name, move || run(false));
}

/// Two blocks of one key, and room for both entries: both are found, whichever was first.
#[test]
fn insert_beside_insert() {
    beside(
        "prefix_index::insert_beside_insert",
        3,
        || Cached::new(1),
        |cached| assert_eq!(cached.insert(1, 1), Inserted::New),
        |cached| assert_eq!(cached.insert(1, 2), Inserted::New),
        Cached::nothing_is_lost,
    );
}

/// Room for one of two entries: one gets it, the other is counted, and the existing entry stays.
#[test]
fn insert_beside_insert_in_the_last_place() {
    beside(
        "prefix_index::insert_beside_insert_in_the_last_place",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(3, 3), Inserted::New);
            cached
        },
        |cached| cached.put(1, 1),
        |cached| cached.put(2, 2),
        |cached| {
            assert_eq!((cached.lost(), cached.index.forgotten()), (1, 1));
            assert!(cached.finds(3, 3), "a valid entry is not replaced");
        },
    );
}

/// A block is registered again, under the same key, while its previous evictor removes the entry.
#[test]
fn a_new_life_beside_the_end_of_the_old_one() {
    beside(
        "prefix_index::a_new_life_beside_the_end_of_the_old_one",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(1, 1), Inserted::New);
            cached.register(0, 1);
            cached
        },
        |cached| cached.unlink(1, 1),
        |cached| cached.put(1, 1),
        Cached::nothing_is_lost,
    );
}

/// The same, while another insertion takes the place of the entry that looked out of date. There is
/// room for one entry too few.
#[test]
fn a_new_life_beside_a_replacement() {
    beside(
        "prefix_index::a_new_life_beside_a_replacement",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(1, 1), Inserted::New);
            assert_eq!(cached.insert(3, 3), Inserted::New);
            cached.register(0, 1);
            cached
        },
        |cached| cached.put(2, 2),
        |cached| cached.put(1, 1),
        |cached| {
            assert!(cached.lost() <= cached.index.forgotten(), "forgotten, but not counted");
            assert_eq!(cached.lost(), 1);
            assert!(cached.finds(3, 3), "a valid entry is not replaced");
        },
    );
}

/// A thread that finds a block reads its word as it was at the insertion, or newer.
#[test]
fn find_beside_insert() {
    beside(
        "prefix_index::find_beside_insert",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(2, 2), Inserted::New);
            cached
        },
        |cached| cached.put(1, 1),
        |cached| {
            cached.index.find::<()>(key(1), |id| {
                assert_eq!(cached.words[id.index()].load(Relaxed), 1, "found before it was registered");
                ControlFlow::Continue(())
            });
            assert!(cached.finds(2, 2));
        },
        Cached::nothing_is_lost,
    );
}

/// A thread that finds a block during its eviction checks the word, and removes the entry too; the
/// other entry stays.
#[test]
fn find_beside_remove() {
    beside(
        "prefix_index::find_beside_remove",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(1, 1), Inserted::New);
            assert_eq!(cached.insert(2, 2), Inserted::New);
            cached
        },
        |cached| cached.evict(1, 1),
        |cached| {
            cached.index.find::<()>(key(1), |id| {
                if cached.registered(id).is_none() {
                    cached.unlink(1, id.0);
                }
                ControlFlow::Continue(())
            });
            assert!(cached.finds(2, 2));
        },
        |cached| {
            cached.nothing_is_lost();
            assert_eq!(cached.index.entries(), 1);
        },
    );
}

/// The same with an entry that was put back by a thread other than the one that registered the
/// block.
#[test]
fn find_beside_putting_back() {
    check("prefix_index::find_beside_putting_back", || {
        let cached = Cached::new(1);
        assert_eq!(cached.insert(1, 1), Inserted::New);
        cached.register(0, 1);
        let (one, two) = (cached.clone(), cached.clone());
        let finder = thread::spawn(move || {
            // An entry that was missing and is present now was made for the new life.
            if !one.finds(1, 1) && one.finds(1, 1) {
                assert_eq!(one.words[1].load(Relaxed), 1, "found before it was registered");
            }
        });
        let owner = thread::spawn(move || two.put(1, 1));
        cached.unlink(1, 1);
        owner.join().unwrap();
        finder.join().unwrap();
        cached.nothing_is_lost();
    });
}

/// Growth during an insertion: the walk sees the word, or the inserter sees the new table.
#[test]
fn grow_beside_insert() {
    beside(
        "prefix_index::grow_beside_insert",
        3,
        || Cached::new(1),
        |cached| cached.grow(2),
        |cached| {
            cached.put(1, 1);
            assert!(cached.finds(1, 1), "by the thread that inserted it");
        },
        |cached| {
            cached.nothing_is_lost();
            assert_eq!(cached.index.capacity(), 4);
        },
    );
}

/// Two insertions, two growths, one after the other.
#[test]
fn two_growths_beside_inserts() {
    beside(
        "prefix_index::two_growths_beside_inserts",
        2,
        || Cached::new(1),
        |cached| {
            cached.grow(2);
            cached.grow(4);
        },
        |cached| {
            cached.put(1, 1);
            cached.put(2, 2);
            assert!(cached.finds(1, 1) && cached.finds(2, 2));
        },
        Cached::nothing_is_lost,
    );
}

/// Look-ups during growth find the entries that existed throughout.
#[test]
fn grow_beside_find() {
    beside(
        "prefix_index::grow_beside_find",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(1, 1), Inserted::New);
            cached
        },
        |cached| cached.grow(2),
        |cached| {
            assert!(cached.finds(1, 1));
            assert!(cached.finds(1, 1));
        },
        Cached::nothing_is_lost,
    );
}

/// A block is evicted, and registered again, during growth: its entry may have been copied to the
/// new table at any time.
#[test]
fn grow_beside_a_new_life() {
    beside(
        "prefix_index::grow_beside_a_new_life",
        3,
        || {
            let cached = Cached::new(1);
            assert_eq!(cached.insert(1, 1), Inserted::New);
            cached
        },
        |cached| cached.grow(2),
        |cached| {
            cached.evict(1, 1);
            cached.put(1, 1);
        },
        Cached::nothing_is_lost,
    );
}

/// All three at once: the evictor is slow, the next owner registers the block again, and the table
/// grows.
#[test]
fn grow_beside_two_lives() {
    check("prefix_index::grow_beside_two_lives", || {
        let cached = Cached::new(1);
        assert_eq!(cached.insert(1, 1), Inserted::New);
        cached.register(0, 1);
        let (one, two) = (cached.clone(), cached.clone());
        let threads = [thread::spawn(move || one.grow(2)), thread::spawn(move || two.put(1, 1))];
        cached.unlink(1, 1);
        for thread in threads {
            thread.join().unwrap();
        }
        cached.nothing_is_lost();
    });
}

/// Two growers, each of which may do the other's work, during an insertion.
#[test]
fn grow_beside_grow() {
    check("prefix_index::grow_beside_grow", || {
        let cached = Cached::new(1);
        assert_eq!(cached.insert(1, 1), Inserted::New);
        let (one, two) = (cached.clone(), cached.clone());
        let threads = [thread::spawn(move || one.grow(2)), thread::spawn(move || two.put(2, 2))];
        cached.grow(2);
        assert_eq!(cached.index.capacity(), 4);
        assert!(cached.finds(1, 1));
        for thread in threads {
            thread.join().unwrap();
        }
        cached.nothing_is_lost();
    });
}

/// A grower is stopped in the middle: other threads insert, find, remove, and grow as if it were
/// absent.
#[test]
fn beside_a_grower_that_is_stopped() {
    check_to(3, "prefix_index::beside_a_grower_that_is_stopped", || {
        let shared = Arc::new((Cached::new(1), AtomicBool::new(false), AtomicBool::new(false)));
        let other = shared.clone();
        let thread = thread::spawn(move || {
            let (cached, stopped, resumed) = &*other;
            cached.index.grow(2, |add| {
                stopped.store(true, Release);
                while !resumed.load(Acquire) {
                    thread::yield_now();
                }
                cached.walk(add);
            });
        });
        let (cached, stopped, resumed) = &*shared;
        while !stopped.load(Acquire) {
            thread::yield_now();
        }
        cached.put(1, 1);
        cached.put(2, 2);
        assert!(cached.finds(1, 1));
        cached.evict(1, 1);
        assert!(!cached.finds(1, 1));
        cached.grow(4);
        assert!(cached.finds(2, 2));
        resumed.store(true, Release);
        thread.join().unwrap();
        cached.nothing_is_lost();
        assert_eq!(cached.index.capacity(), 8);
    });
}
