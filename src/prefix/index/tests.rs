use std::sync::Mutex;

use crate::sync::{AtomicU64, Ordering::*};

use super::*;

/// Stands in for words and rows: the number of the key under which each block is registered, or 0.
struct Words(Vec<AtomicU64>);

impl Words {
    fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicU64::new(0)).collect())
    }

    fn set(&self, id: BlockId, number: u64) {
        self.0[id.index()].store(number, Release);
    }

    fn registered(&self, id: BlockId) -> Option<Key> {
        let number = self.0[id.index()].load(Acquire);
        (number != 0).then(|| key(number))
    }
}

fn key(number: u64) -> Key {
    let mix = |word: u64| {
        let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    };
    Key(mix(2 * number + 1), mix(2 * number + 2))
}

fn found(index: &Index, key: Key) -> Vec<BlockId> {
    let mut all = Vec::new();
    let broke = index.find::<()>(key, |id| {
        all.push(id);
        ControlFlow::Continue(())
    });
    assert_eq!(broke, None);
    // A small index has a single bucket, so every entry is reported twice.
    all.sort_unstable();
    all.dedup();
    all
}

fn unregistered(_: BlockId) -> Option<Key> {
    None
}

#[test]
fn a_block_is_found_by_its_key_until_it_is_removed() {
    let index = Index::new(64);
    let words = Words::new(8);
    words.set(BlockId(3), 1);
    assert_eq!(found(&index, key(1)), []);
    assert_eq!(index.insert(key(1), BlockId(3), |id| words.registered(id)), Inserted::New);
    assert_eq!(index.insert(key(1), BlockId(3), |id| words.registered(id)), Inserted::Present);
    assert_eq!(found(&index, key(1)), [BlockId(3)]);
    assert_eq!(found(&index, key(2)), []);
    assert_eq!(index.entries(), 1);
    words.set(BlockId(3), 0);
    index.remove(key(1), BlockId(3), |id| words.registered(id));
    assert_eq!(found(&index, key(1)), []);
    assert_eq!(index.entries(), 0);
}

#[test]
fn blocks_of_one_key_are_all_found_and_removed_one_by_one() {
    let index = Index::new(64);
    index.insert_all((1..=16).map(|id| (key(1), BlockId(id))), unregistered, |_| {});
    assert_eq!(found(&index, key(1)), (1..=16).map(BlockId).collect::<Vec<_>>(), "two buckets full");
    assert!(index.find(key(1), ControlFlow::Break).is_some());
    index.remove(key(1), BlockId(7), unregistered);
    assert!(!found(&index, key(1)).contains(&BlockId(7)));
    assert_eq!(index.entries(), 15);
}

#[test]
fn keys_of_zeros_are_keys() {
    let index = Index::new(64);
    for number in 0..4 {
        let small = Key(number, number);
        assert_eq!(found(&index, small), []);
        assert_eq!(index.insert(small, BlockId(number as u32), unregistered), Inserted::New);
        assert_eq!(found(&index, small), [BlockId(number as u32)]);
    }
}

#[test]
fn what_is_right_is_never_replaced_and_what_is_out_of_date_is() {
    let index = Index::new(4);
    assert_eq!(index.capacity(), 8, "one bucket");
    let words = Words::new(32);
    let registered = |id| words.registered(id);
    for id in 1..=8 {
        words.set(BlockId(id), id as u64);
        assert_eq!(index.insert(key(id as u64), BlockId(id), registered), Inserted::New);
    }
    words.set(BlockId(9), 9);
    assert_eq!(index.insert(key(9), BlockId(9), registered), Inserted::Full);
    assert_eq!(index.forgotten(), 1);
    for id in 1..=8 {
        assert_eq!(found(&index, key(id)), [BlockId(id as u32)]);
    }
    // The block is registered under another key, so its old entry is outdated.
    words.set(BlockId(5), 50);
    assert_eq!(index.insert(key(9), BlockId(9), registered), Inserted::New);
    assert_eq!(found(&index, key(9)), [BlockId(9)]);
    assert_eq!(found(&index, key(5)), []);
    assert_eq!((index.forgotten(), index.entries()), (1, 8));
}

#[test]
fn to_remove_what_is_registered_does_no_harm() {
    let index = Index::new(64);
    let words = Words::new(8);
    words.set(BlockId(3), 1);
    let _ = index.insert(key(1), BlockId(3), |id| words.registered(id));
    index.remove(key(1), BlockId(3), |id| words.registered(id));
    assert_eq!(found(&index, key(1)), [BlockId(3)]);
    index.remove(key(2), BlockId(3), |id| words.registered(id));
    assert_eq!(found(&index, key(1)), [BlockId(3)]);
}

/// At full load and after long churn, no entry is forgotten, and most are in their first bucket.
#[test]
fn a_full_pool_fits() {
    let blocks: u32 = if cfg!(miri) { 1 << 5 } else { 1 << 15 };
    let index = Index::new(blocks as usize);
    let words = Words::new(blocks as usize + 1);
    let registered = |id| words.registered(id);
    let numbers = if cfg!(miri) { 1..3 * blocks } else { 1..20 * blocks };
    let mut random = fastrand::Rng::with_seed(1);
    let mut held = Vec::new();
    for number in numbers.map(u64::from) {
        let id = if held.len() < blocks as usize {
            BlockId(held.len() as u32 + 1)
        } else {
            let (old, id) = held.swap_remove(random.usize(..held.len()));
            words.set(id, 0);
            index.remove(key(old), id, registered);
            assert_eq!(found(&index, key(old)), []);
            id
        };
        words.set(id, number);
        assert_eq!(index.insert(key(number), id, registered), Inserted::New);
        held.push((number, id));
    }
    assert_eq!((index.forgotten(), index.entries()), (0, blocks as usize));
    let first = held.iter().filter(|(number, id)| {
        assert_eq!(found(&index, key(*number)), [*id]);
        index.current().is_in_first(key(*number), *id)
    });
    let share = first.count() as f64 / f64::from(blocks);
    assert!(share > 0.8 || cfg!(miri), "{share} in the first of two buckets");
}

/// Threads register a few blocks concurrently, each under one of two keys: all are found then.
#[test]
fn beside_each_other_nothing_is_lost() {
    const BLOCKS: u32 = 24;
    let lives = if cfg!(miri) { 20 } else { 40_000 };
    let index = Index::new(BLOCKS as usize);
    let words = Words::new(BLOCKS as usize + 1);
    let registered = |id| words.registered(id);
    // A block has one owner at a time; any thread may remove an entry that looks outdated.
    let free: Mutex<Vec<BlockId>> = Mutex::new((1..=BLOCKS).map(BlockId).collect());
    let walk = |add: &mut dyn FnMut(Key, BlockId)| {
        (1..=BLOCKS)
            .map(BlockId)
            .filter_map(|id| Some((registered(id)?, id)))
            .for_each(|(key, id)| add(key, id));
    };
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (index, words, free) = (&index, &words, &free);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for life in 0..lives {
                    let id = {
                        let mut free = free.lock().unwrap();
                        let at = random.usize(..free.len());
                        free.swap_remove(at)
                    };
                    if let Some(key) = registered(id) {
                        words.set(id, 0);
                        index.remove(key, id, registered);
                    }
                    let number = 2 * id.0 as u64 + random.u64(..2);
                    words.set(id, number);
                    let _ = index.insert(key(number), id, registered);
                    if random.bool() {
                        words.set(id, 0);
                        index.remove(key(number), id, registered);
                    }
                    let any = random.u32(1..=BLOCKS);
                    index.remove(key(2 * any as u64 + random.u64(..2)), BlockId(any), registered);
                    free.lock().unwrap().push(id);
                    if life == lives / 2 {
                        index.grow(64 << seed, walk);
                    }
                }
            });
        }
    });
    let lost = (1..=BLOCKS)
        .map(BlockId)
        .filter(|&id| registered(id).is_some_and(|key| !found(&index, key).contains(&id)));
    assert_eq!((lost.count(), index.forgotten()), (0, 0));
    assert_eq!(index.capacity(), 512);
}

#[test]
fn growth_keeps_what_is_registered_and_leaves_the_rest_behind() {
    let index = Index::new(64);
    let words = Words::new(500);
    let registered = |id| words.registered(id);
    for id in 1..=64 {
        words.set(BlockId(id), id as u64);
        assert_eq!(index.insert(key(id as u64), BlockId(id), registered), Inserted::New);
    }
    words.set(BlockId(9), 0);
    let mut walks = 0;
    let mut walk = |add: &mut dyn FnMut(Key, BlockId)| {
        walks += 1;
        (0..500).map(BlockId).filter_map(|id| Some((registered(id)?, id))).for_each(|(key, id)| add(key, id));
    };
    index.grow(40, &mut walk);
    assert_eq!(index.capacity(), 128, "already large enough");
    index.grow(400, &mut walk);
    assert_eq!((index.capacity(), index.entries(), walks), (1024, 63, 1));
    assert_eq!(found(&index, key(9)), []);
    for id in (1..=64).filter(|id| *id != 9) {
        assert_eq!(found(&index, key(id)), [BlockId(id as u32)]);
    }
    let words_of_entries = (128 + 1024) * size_of::<u64>();
    assert!((words_of_entries..words_of_entries + 256).contains(&index.bytes()), "{}", index.bytes());
}

#[test]
fn what_is_inserted_and_removed_during_growth_is_so_afterwards() {
    let index = Index::new(8);
    let words = Words::new(8);
    let registered = |id| words.registered(id);
    words.set(BlockId(1), 1);
    let _ = index.insert(key(1), BlockId(1), registered);
    index.grow(64, |add| {
        words.set(BlockId(2), 2);
        assert_eq!(index.insert(key(2), BlockId(2), registered), Inserted::New);
        assert_eq!(found(&index, key(2)), [BlockId(2)], "found at once in the old table");
        add(key(1), BlockId(1));
        words.set(BlockId(1), 0);
        index.remove(key(1), BlockId(1), registered);
        index.grow(64, |add| add(key(2), BlockId(2)));
        assert_eq!(index.capacity(), 128);
    });
    assert_eq!((index.capacity(), index.entries()), (128, 1));
    assert_eq!((found(&index, key(1)), found(&index, key(2))), (vec![], vec![BlockId(2)]));
}
