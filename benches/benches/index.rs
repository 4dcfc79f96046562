//! The index of cached blocks: look-ups of a prompt's keys, and changes of entries, by one thread
//! and by two.
//!
//! The baseline is dashmap; others are a map behind a lock, and a lock-free map. All take the key,
//! which is already a hash, as its own hash. A map compares whole keys; the index gives hints, so
//! here too the finder compares the key in the block's row before it counts as found (`kvpool`); in
//! a variant, lines are prefetched (`kvpool, fetched`: the bucket of the key eight places ahead).
//!
//! *Again*: the same prompt each time, so that all of its data is in the nearest cache. *Any*: a
//! random prompt of a full index. *Change*: every key of a prompt is removed, then inserted.
//! *Beside*: look-ups of any prompt by one thread while another changes entries; the look-ups are
//! timed. Times are in ns per key; medians of interleaved rounds.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;
use std::ops::{ControlFlow, Range};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::time::Duration;

use dashmap::DashMap;
use kvpool::BlockId;
use kvpool::prefix::{Index, Key};
use kvpool_benches::report::median;
use kvpool_benches::threads::together;

const ROUNDS: usize = 11;
const KEYS_A_ROUND: usize = 200_000;
const AHEAD: usize = 8;

/// Takes a key as its own hash.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u128");
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Build = BuildHasherDefault<Identity>;

/// An index that initially knows every block.
trait Subject: Sync {
    const NAME: &'static str;
    fn new(keys: &[Key]) -> Self;
    /// Returns the number of keys of a prompt found, in their positions.
    fn find(&self, keys: &[Key], blocks: Range<usize>) -> usize;
    fn remove(&self, keys: &[Key], blocks: Range<usize>);
    fn insert(&self, keys: &[Key], blocks: Range<usize>);
}

fn whole(key: Key) -> u128 {
    u128::from(key.0) << 64 | u128::from(key.1)
}

macro_rules! map {
    ($name:ident, $title:literal, $map:ty, $new:expr, |$this:ident, $key:ident, $id:ident| $get:expr, $insert:expr, $remove:expr) => {
        struct $name($map);

        impl Subject for $name {
            const NAME: &'static str = $title;

            fn new(keys: &[Key]) -> Self {
                let map = Self($new(keys.len()));
                map.insert(keys, 0..keys.len());
                map
            }

            #[inline(never)]
            fn find(&self, keys: &[Key], blocks: Range<usize>) -> usize {
                let $this = &self.0;
                let is_found = |block: &usize| {
                    let $key = whole(keys[*block]);
                    let got: Option<u32> = $get;
                    got == Some(*block as u32)
                };
                blocks.filter(is_found).count()
            }

            #[inline(never)]
            fn remove(&self, keys: &[Key], blocks: Range<usize>) {
                let $this = &self.0;
                for block in blocks {
                    let $key = whole(keys[block]);
                    let _ = $remove;
                }
            }

            #[inline(never)]
            fn insert(&self, keys: &[Key], blocks: Range<usize>) {
                let $this = &self.0;
                for block in blocks {
                    let ($key, $id) = (whole(keys[block]), block as u32);
                    let _ = $insert;
                }
            }
        }
    };
}

map!(
    Sharded,
    "dashmap",
    DashMap<u128, u32, Build>,
    |blocks| DashMap::with_capacity_and_hasher(blocks, Build::default()),
    |map, key, id| map.get(&key).map(|entry| *entry),
    map.insert(key, id),
    map.remove(&key)
);

map!(
    Locked,
    "RwLock<HashMap>",
    RwLock<HashMap<u128, u32, Build>>,
    |blocks| RwLock::new(HashMap::with_capacity_and_hasher(blocks, Build::default())),
    |map, key, id| map.read().expect("no thread panicked").get(&key).copied(),
    map.write().expect("no thread panicked").insert(key, id),
    map.write().expect("no thread panicked").remove(&key)
);

map!(
    LockFree,
    "papaya",
    papaya::HashMap<u128, u32, Build>,
    |blocks| papaya::HashMap::with_capacity_and_hasher(blocks, Build::default()),
    |map, key, id| map.pin().get(&key).copied(),
    map.pin().insert(key, id),
    map.pin().remove(&key)
);

/// The index, with the words and rows of its blocks.
struct Ours<const FETCHED: bool> {
    index: Index,
    rows: Vec<(AtomicBool, Key)>,
}

impl<const FETCHED: bool> Ours<FETCHED> {
    fn registered(&self, id: BlockId) -> Option<Key> {
        let (is_registered, key) = &self.rows[id.index()];
        is_registered.load(Acquire).then_some(*key)
    }
}

impl<const FETCHED: bool> Subject for Ours<FETCHED> {
    const NAME: &'static str = if FETCHED { "kvpool, fetched" } else { "kvpool" };

    fn new(keys: &[Key]) -> Self {
        let rows = keys.iter().map(|key| (AtomicBool::new(false), *key)).collect();
        let ours = Self { index: Index::new(keys.len()), rows };
        ours.insert(keys, 0..keys.len());
        assert_eq!(ours.index.forgotten(), 0);
        ours
    }

    #[inline(never)]
    fn find(&self, keys: &[Key], blocks: Range<usize>) -> usize {
        let last = blocks.end - 1;
        let is_found = |block: &usize| {
            if FETCHED {
                self.index.prefetch(keys[(*block + AHEAD).min(last)]);
            }
            let key = keys[*block];
            let found = self.index.find(key, |id| {
                let (is_registered, row) = &self.rows[id.index()];
                if is_registered.load(Acquire) && *row == key {
                    ControlFlow::Break(id.index())
                } else {
                    ControlFlow::Continue(())
                }
            });
            found == Some(*block)
        };
        blocks.filter(is_found).count()
    }

    #[inline(never)]
    fn remove(&self, keys: &[Key], blocks: Range<usize>) {
        for block in blocks {
            self.rows[block].0.store(false, Release);
            self.index.remove(keys[block], BlockId(block as u32), |id| self.registered(id));
        }
    }

    #[inline(never)]
    fn insert(&self, keys: &[Key], blocks: Range<usize>) {
        blocks.clone().for_each(|block| self.rows[block].0.store(true, Release));
        let pairs = blocks.map(move |block| (keys[block], BlockId(block as u32)));
        self.index.insert_all(pairs, |id| self.registered(id), |_| {});
    }
}

#[derive(Clone, Copy)]
enum Work {
    Again,
    Any,
    Change,
    Beside,
}

/// Prompts of `len` keys; each thread has its own.
struct Prompts<'a> {
    keys: &'a [Key],
    len: usize,
    threads: usize,
}

impl Prompts<'_> {
    fn pick(&self, thread: usize, random: &mut fastrand::Rng) -> Range<usize> {
        let each = self.keys.len() / self.len / self.threads;
        let prompt = thread * each + random.usize(..each);
        prompt * self.len..(prompt + 1) * self.len
    }

    /// Returns the time in ns per key.
    fn time<S: Subject>(&self, subject: &S, work: Work, seed: u64) -> f64 {
        let times = KEYS_A_ROUND / self.len;
        let wrong = AtomicUsize::new(0);
        let is_over = AtomicBool::new(false);
        let prepare = |thread: usize| fastrand::Rng::with_seed(2 * seed + thread as u64);
        let find = |blocks: Range<usize>| {
            if black_box(subject.find(self.keys, blocks)) != self.len {
                wrong.fetch_add(1, Relaxed);
            }
        };
        let slowest = together(self.threads, prepare, |thread, random| match work {
            Work::Again => {
                let blocks = self.pick(thread, random);
                (0..times).for_each(|_| find(blocks.clone()));
            }
            Work::Any => (0..times).for_each(|_| find(self.pick(thread, random))),
            Work::Beside if thread == 0 => {
                (0..times).for_each(|_| find(self.pick(thread, random)));
                is_over.store(true, Relaxed);
            }
            Work::Change => (0..times).for_each(|_| self.change(subject, thread, random)),
            Work::Beside => {
                while !is_over.load(Relaxed) {
                    self.change(subject, thread, random);
                }
            }
        });
        assert_eq!(wrong.into_inner(), 0, "{} does not find existing entries", S::NAME);
        nanoseconds(slowest) / (times * self.len) as f64
    }

    fn change<S: Subject>(&self, subject: &S, thread: usize, random: &mut fastrand::Rng) {
        let blocks = self.pick(thread, random);
        subject.remove(self.keys, blocks.clone());
        subject.insert(self.keys, blocks);
    }
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_nanos() as f64
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("index: to measure, run `cargo bench -p kvpool-benches --bench index`");
        return;
    }
    for blocks in [65_536, 1_000_000] {
        let mut random = fastrand::Rng::with_seed(7);
        let keys: Vec<Key> = (0..blocks).map(|_| Key(random.u64(..), random.u64(..))).collect();
        let (sharded, locked, free) = (Sharded::new(&keys), Locked::new(&keys), LockFree::new(&keys));
        let (plain, fetched) = (Ours::<false>::new(&keys), Ours::<true>::new(&keys));
        println!("\n{blocks} blocks; the index takes {} bytes per block", plain.index.bytes() / blocks);
        println!(
            "{:<34} {:>9} {:>16} {:>9} {:>9} {:>16}",
            "ns a key",
            Sharded::NAME,
            Locked::NAME,
            LockFree::NAME,
            "kvpool",
            "kvpool, fetched"
        );
        for (name, work, len, threads) in [
            ("again, 62 keys, 1 thread", Work::Again, 62, 1),
            ("any, 62 keys, 1 thread", Work::Any, 62, 1),
            ("any, 500 keys, 1 thread", Work::Any, 500, 1),
            ("again, 62 keys, 2 threads", Work::Again, 62, 2),
            ("any, 62 keys, 2 threads", Work::Any, 62, 2),
            ("any, 500 keys, 2 threads", Work::Any, 500, 2),
            ("change, 62 keys, 1 thread", Work::Change, 62, 1),
            ("change, 62 keys, 2 threads", Work::Change, 62, 2),
            ("any, 62 keys, beside change", Work::Beside, 62, 2),
        ] {
            let prompts = Prompts { keys: &keys, len, threads };
            let mut times: [Vec<f64>; 5] = Default::default();
            for round in 0..ROUNDS as u64 {
                times[0].push(prompts.time(&sharded, work, round));
                times[1].push(prompts.time(&locked, work, round));
                times[2].push(prompts.time(&free, work, round));
                times[3].push(prompts.time(&plain, work, round));
                times[4].push(prompts.time(&fetched, work, round));
            }
            let [base, locked, free, plain, fetched] = times.map(median);
            println!(
                "{name:<34} {base:>9.1} {locked:>16.1} {free:>9.1} {plain:>9.1} {fetched:>16.1}   {:.2} of dashmap",
                fetched / base
            );
        }
    }
}
