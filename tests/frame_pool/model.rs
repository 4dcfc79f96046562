//! Random operations against a naive pool: hash maps, and a free queue as engines have them.

use std::collections::{BTreeSet, HashMap, VecDeque};

use kvpool::compact::Goal;
use kvpool::{AllocRequest, FrameError, FrameId, FrameMoves, FramePool, FrameShrinkError, Order};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{key, references};

const FRAMES: usize = 40;
const CONTENTS: u64 = 30;
/// Stands for the unknown contents of a frame that is kept without a key.
const KEPT: u64 = u64::MAX;

#[derive(Clone, Debug)]
enum Operation {
    Allocate(usize),
    AllocateRuns(usize),
    Claim(Vec<u32>),
    Free(Vec<u32>),
    FreeHeld { take: usize, skip: usize, evict_first: bool },
    KeepHeld { take: usize, skip: usize },
    Share(Vec<u32>),
    Register(Vec<(u32, u64)>),
    RegisterHeld { skip: usize, contents: Vec<u64> },
    Hit(Vec<u64>),
    Uncache(Vec<u32>),
    Unregister(u64),
    MoveKeys(u32, u32),
    Clear,
    Moves { order: u8, commits: bool, hit: u64 },
    Grow(usize),
    Shrink { to: usize, moves: bool },
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let frame = || 1..=FRAMES as u32;
    let content = || 0..CONTENTS;
    prop_oneof![
        6 => (1..12_usize).prop_map(Allocate),
        2 => (1..12_usize).prop_map(AllocateRuns),
        1 => vec(frame(), 0..4).prop_map(Claim),
        1 => vec(frame(), 1..4).prop_map(Free),
        7 => (1..20_usize, 0..30_usize, prop::bool::weighted(0.3))
            .prop_map(|(take, skip, evict_first)| FreeHeld { take, skip, evict_first }),
        3 => (1..20_usize, 0..30_usize).prop_map(|(take, skip)| KeepHeld { take, skip }),
        2 => vec(frame(), 1..4).prop_map(Share),
        1 => vec((frame(), content()), 1..4).prop_map(Register),
        6 => (0..30_usize, vec(content(), 1..10)).prop_map(|(skip, contents)| RegisterHeld { skip, contents }),
        4 => vec(content(), 1..4).prop_map(Hit),
        1 => vec(frame(), 1..4).prop_map(Uncache),
        2 => content().prop_map(Unregister),
        1 => (frame(), frame()).prop_map(|(from, to)| MoveKeys(from, to)),
        1 => Just(Clear),
        2 => (1..4_u8, any::<bool>(), content()).prop_map(|(order, commits, hit)| Moves { order, commits, hit }),
        1 => (0..FRAMES).prop_map(Grow),
        2 => (0..=FRAMES, any::<bool>()).prop_map(|(to, moves)| Shrink { to, moves }),
    ]
}

/// The naive pool.
struct Model {
    /// Number of frames.
    total: usize,
    references: HashMap<u32, usize>,
    /// Contents by which a cached frame is known.
    keys: HashMap<u32, BTreeSet<u64>>,
    /// Cached frames without references, in eviction order: those freed to be evicted first, then
    /// the others.
    evict_first: VecDeque<u32>,
    queue: VecDeque<u32>,
}

impl Model {
    fn new(total: usize) -> Self {
        let (references, keys) = (HashMap::new(), HashMap::new());
        Self { total, references, keys, evict_first: VecDeque::new(), queue: VecDeque::new() }
    }

    fn frames(&self) -> Vec<u32> {
        (1..=self.total as u32).collect()
    }

    fn has(&self, frame: u32) -> bool {
        frame as usize <= self.total
    }

    fn evictable(&self) -> usize {
        self.evict_first.len() + self.queue.len()
    }

    fn available(&self) -> usize {
        self.free() + self.evictable()
    }

    fn unqueue(&mut self, frame: u32) {
        self.evict_first.retain(|&other| other != frame);
        self.queue.retain(|&other| other != frame);
    }

    /// Evicts the next frame.
    fn evict(&mut self) -> u32 {
        let next = self.evict_first.pop_front().or_else(|| self.queue.pop_front()).expect("available");
        self.keys.remove(&next);
        next
    }

    fn references(&self, frame: u32) -> usize {
        self.references.get(&frame).copied().unwrap_or_default()
    }

    fn is_free(&self, frame: u32) -> bool {
        self.references(frame) == 0 && !self.keys.contains_key(&frame)
    }

    fn free(&self) -> usize {
        self.frames().iter().filter(|&&frame| self.is_free(frame)).count()
    }

    fn knows(&self, content: u64) -> Vec<u32> {
        self.keys.iter().filter(|(_, keys)| keys.contains(&content)).map(|(&frame, _)| frame).collect()
    }

    fn take(&mut self, frame: u32) {
        self.unqueue(frame);
        *self.references.entry(frame).or_default() += 1;
    }

    fn release(&mut self, frame: u32, evict_first: bool) {
        let references = self.references.get_mut(&frame).unwrap();
        *references -= 1;
        if *references == 0 {
            self.references.remove(&frame);
            if self.keys.contains_key(&frame) {
                let queue = if evict_first { &mut self.evict_first } else { &mut self.queue };
                queue.push_back(frame);
            }
        }
    }

    fn forget(&mut self, frame: u32) -> bool {
        self.unqueue(frame);
        self.keys.remove(&frame).is_some()
    }

    /// Takes allocated frames: the free ones were free, the others were next in the queue.
    fn allocated(&mut self, frames: &[u32]) {
        let free = self.free();
        let evicted = frames.len().saturating_sub(free);
        for _ in 0..evicted {
            let next = self.evict();
            assert!(frames.contains(&next), "frame {next} is evicted next, not one of {frames:?}");
        }
        for &frame in frames {
            assert!(self.is_free(frame), "frame {frame} was not free");
            self.take(frame);
        }
    }

    /// Returns whether each frame of the list has as many references as it is listed.
    fn can_free(&self, frames: &[u32]) -> bool {
        let listed = |frame: u32| frames.iter().filter(|&&other| other == frame).count();
        frames.iter().all(|&frame| listed(frame) <= self.references(frame))
    }
}

struct World {
    pool: FramePool,
    model: Model,
}

impl World {
    fn held(&self) -> Vec<u32> {
        let mut held: Vec<u32> = self.model.references.keys().copied().collect();
        held.sort_unstable();
        held
    }

    fn free(&mut self, frames: &[u32], evict_first: bool) {
        let freed = if evict_first { self.pool.free_evict_first(frames) } else { self.pool.free(frames) };
        assert_eq!(freed.is_ok(), self.model.can_free(frames), "{frames:?}: {freed:?}");
        if freed.is_ok() {
            frames.iter().for_each(|&frame| self.model.release(frame, evict_first));
        }
    }

    fn register(&mut self, named: &[(u32, u64)]) {
        let keys: Vec<_> = named.iter().map(|&(frame, content)| (frame, key(&self.pool, content))).collect();
        let registered = self.pool.register(&keys);
        let can = named.iter().all(|&(frame, _)| self.model.references(frame) > 0);
        assert_eq!(registered.is_ok(), can, "{named:?}: {registered:?}");
        if can {
            for &(frame, content) in named {
                self.model.keys.entry(frame).or_default().insert(content);
            }
        }
    }

    fn hit(&mut self, contents: &[u64]) {
        let keys: Vec<_> = contents.iter().map(|&content| key(&self.pool, content)).collect();
        let mut hits = Vec::new();
        self.pool.hit(&keys, &mut hits).unwrap();
        let known = contents.iter().take_while(|&&content| !self.model.knows(content).is_empty()).count();
        assert_eq!(hits.len(), known, "of {contents:?}");
        for (&frame, &content) in hits.iter().zip(contents) {
            assert!(self.model.knows(content).contains(&frame), "frame {frame} for {content}");
            self.model.take(frame);
        }
    }

    fn moves(&mut self, order: u8, commits: bool, hit: u64) {
        let moves = self.pool.propose_moves(Goal::Fragmentation { order: Order(order) }, FRAMES);
        let pairs: Vec<_> = moves.pairs().collect();
        for &(from, to) in &pairs {
            assert!(self.model.references(from) == 0 && self.model.keys.contains_key(&from));
            assert!(self.model.is_free(to));
        }
        self.hit(&[hit]);
        if !commits {
            return moves.cancel();
        }
        self.commit(moves);
    }

    fn commit(&mut self, moves: FrameMoves) {
        let pairs = moves.len();
        let outcome = moves.commit();
        assert_eq!(outcome.moved.len() + outcome.stayed.len(), pairs);
        for (from, to) in outcome.moved {
            assert_eq!(self.model.references(from), 0, "only frames without references move");
            let keys = self.model.keys.remove(&from).unwrap();
            self.model.keys.insert(to, keys);
            let queued = self.model.evict_first.iter_mut().chain(self.model.queue.iter_mut());
            queued.filter(|frame| **frame == from).for_each(|frame| *frame = to);
        }
    }

    fn grow(&mut self, frames: usize) {
        let grown = self.pool.grow(frames);
        let can = frames > 0 && self.model.total + frames <= FRAMES;
        assert_eq!(grown.is_ok(), can, "{} and {frames}: {grown:?}", self.model.total);
        self.model.total += if can { frames } else { 0 };
    }

    fn shrink(&mut self, to: usize, moves: bool) {
        let total = self.model.total;
        let shrink = self.pool.begin_shrink(to);
        assert_eq!(shrink.is_ok(), to > 0 && to < total, "{total} to {to}: {shrink:?}");
        let Ok(shrink) = shrink else { return };
        let region = to as u32 + 1..=total as u32;
        if moves {
            let stay = self.model.references.keys().filter(|&frame| !region.contains(frame)).count();
            let over = (stay + self.model.evictable()).saturating_sub(to);
            for _ in 0..over.min(self.model.evictable()) {
                self.model.evict();
            }
            let moves = shrink.propose_moves(FRAMES);
            assert!(moves.pairs().all(|(from, to)| region.contains(&from) && !region.contains(&to)));
            self.commit(moves);
        }
        let in_use: Vec<_> =
            region.clone().filter(|&frame| self.model.references(frame) > 0).map(FrameId).collect();
        assert_eq!(shrink.in_use(), in_use);
        let cached = region.clone().filter(|frame| self.model.keys.contains_key(frame)).count();
        assert!(!moves || cached == in_use.iter().filter(|f| self.model.keys.contains_key(&f.0)).count());
        match shrink.finish() {
            Ok(()) => {
                assert_eq!(in_use, []);
                region.for_each(|frame| {
                    self.model.forget(frame);
                });
                self.model.total = to;
            }
            Err(error) => assert_eq!(error, FrameShrinkError::InUse { frames: in_use }),
        }
    }

    fn run(&mut self, operation: &Operation) {
        use Operation::*;
        match operation {
            Allocate(count) | AllocateRuns(count) => {
                let (mut frames, mut runs) = (Vec::new(), Vec::new());
                let request = AllocRequest::new(*count);
                let allocated = if matches!(operation, Allocate(_)) {
                    self.pool.allocate(request, &mut frames)
                } else {
                    let allocated = self.pool.allocate_runs(request, &mut runs);
                    frames.extend(runs.iter().flat_map(|run| run.start.0..run.end()));
                    allocated
                };
                assert_eq!(allocated.is_ok(), self.model.available() >= *count, "{allocated:?}");
                assert_eq!(frames.len(), if allocated.is_ok() { *count } else { 0 });
                self.model.allocated(&frames);
            }
            Claim(frames) => {
                let claimed = self.pool.claim(frames);
                let distinct: BTreeSet<u32> = frames.iter().copied().collect();
                let is_unused = |&frame: &u32| self.model.has(frame) && self.model.references(frame) == 0;
                let can = distinct.len() == frames.len() && frames.iter().all(is_unused);
                assert_eq!(claimed.is_ok(), can, "{frames:?}: {claimed:?}");
                if can {
                    for &frame in frames {
                        self.model.forget(frame);
                        self.model.take(frame);
                    }
                }
            }
            Free(frames) => self.free(frames, false),
            FreeHeld { take, skip, evict_first } => {
                let held: Vec<u32> = self.held().into_iter().skip(*skip).take(*take).rev().collect();
                self.free(&held, *evict_first);
            }
            KeepHeld { take, skip } => {
                let held: Vec<u32> = self.held().into_iter().skip(*skip).take(*take).rev().collect();
                self.pool.keep(&held).unwrap();
                for frame in held {
                    self.model.keys.entry(frame).or_insert_with(|| BTreeSet::from([KEPT]));
                    self.model.release(frame, false);
                }
            }
            Share(frames) => {
                let shared = self.pool.share(frames);
                let can = frames.iter().all(|&frame| !self.model.is_free(frame));
                assert_eq!(shared.is_ok(), can, "{frames:?}: {shared:?}");
                if can {
                    frames.iter().for_each(|&frame| self.model.take(frame));
                }
            }
            Register(named) => self.register(named),
            RegisterHeld { skip, contents } => {
                let held = self.held().into_iter().skip(*skip);
                self.register(&held.zip(contents.iter().copied()).collect::<Vec<_>>());
            }
            Hit(contents) => self.hit(contents),
            Uncache(frames) => {
                let uncached = self.pool.uncache(frames);
                assert_eq!(uncached.is_ok(), frames.iter().all(|&frame| self.model.has(frame)));
                let Ok(uncached) = uncached else { return };
                assert_eq!(uncached, frames.iter().filter(|&&frame| self.model.forget(frame)).count());
            }
            Unregister(content) => {
                let known = self.model.knows(*content);
                assert_eq!(self.pool.unregister(key(&self.pool, *content)).unwrap(), known.len());
                for frame in known {
                    let keys = self.model.keys.get_mut(&frame).unwrap();
                    keys.remove(content);
                    if keys.is_empty() {
                        self.model.forget(frame);
                    }
                }
            }
            MoveKeys(from, to) => {
                let moved = self.pool.move_keys(*from, *to);
                let is_owned = |frame| self.model.references(frame) > 0;
                let can = is_owned(*from) && is_owned(*to) && from != to && !self.model.keys.contains_key(to);
                assert_eq!(moved.is_ok(), can, "{moved:?}");
                if let Ok(moved) = moved {
                    let mut keys = self.model.keys.remove(from).unwrap_or_default();
                    keys.remove(&KEPT);
                    assert_eq!(moved, keys.len());
                    if moved > 0 {
                        self.model.keys.insert(*to, keys);
                    }
                }
            }
            Clear => {
                let cleared = self.pool.clear_idle();
                assert_eq!(cleared.is_ok(), self.model.references.is_empty(), "{cleared:?}");
                if cleared.is_ok() {
                    self.model = Model::new(self.model.total);
                }
            }
            Moves { order, commits, hit } => self.moves(*order, *commits, *hit),
            Grow(frames) => self.grow(*frames),
            Shrink { to, moves } => self.shrink(*to, *moves),
        }
    }

    /// Compares the order, read at once and from a cursor on.
    fn compare_order(&self) {
        let model = &self.model;
        let free = model.frames().into_iter().filter(|&frame| model.is_free(frame));
        let expected: Vec<u32> =
            free.chain(model.evict_first.iter().copied()).chain(model.queue.iter().copied()).collect();
        let read = |cursor, most| {
            let mut order = vec![7];
            self.pool.available_after(cursor, most, &mut order).map(|()| order.split_off(1))
        };
        assert_eq!(read(None, usize::MAX).unwrap(), expected);
        for at in (0..expected.len()).step_by(5) {
            let page: Vec<u32> = expected[at + 1..].iter().take(7).copied().collect();
            assert_eq!(read(Some(expected[at]), 7).unwrap(), page, "after {} of {expected:?}", expected[at]);
        }
        if let Some(frame) = self.held().first() {
            assert!(matches!(read(Some(*frame), 1), Err(FrameError::InUse { index: 0, .. })));
        }
    }

    fn compare(&self) {
        let frames = self.model.frames();
        let expected: Vec<u32> = frames.iter().map(|&frame| self.model.references(frame) as u32).collect();
        assert_eq!(references(&self.pool, &frames), expected);
        for &frame in &frames {
            let (references, mut keys) = (self.model.references(frame), self.model.keys.get(&frame).cloned());
            let is_cached = keys.as_mut().map(|keys| keys.remove(&KEPT)).is_some();
            if !self.model.is_free(frame) {
                let mut info = Vec::new();
                self.pool.info(&[frame], &mut info).unwrap();
                let hashes = keys.as_ref().map_or(0, BTreeSet::len);
                assert_eq!((info[0].references as usize, info[0].hashes), (references, hashes));
            }
            if references > 0 {
                let is_writable = references == 1 && !is_cached;
                assert_eq!(self.pool.is_writable(frame), Ok(is_writable), "frame {frame}");
            }
            let mut hashes = self.pool.hashes(frame).unwrap();
            let keys = keys.into_iter().flatten();
            let mut expected: Vec<_> = keys.map(|content| key(&self.pool, content).hash()).collect();
            hashes.sort_unstable();
            expected.sort_unstable();
            assert_eq!(hashes, expected, "of frame {frame}");
        }
        for content in 0..CONTENTS {
            let (known, found) =
                (self.model.knows(content), self.pool.cached(key(&self.pool, content)).unwrap());
            assert_eq!(found.is_some(), !known.is_empty(), "{content}: {found:?} of {known:?}");
            assert!(found.is_none_or(|found| known.contains(&found)), "{content}: {found:?} of {known:?}");
        }
        let (counts, report) = (self.pool.counts(), self.pool.audit().unwrap());
        assert_eq!((counts.free(), counts.held), (self.model.free(), 0));
        assert_eq!(report.owned, self.model.references.len());
        assert_eq!(report.evictable, self.model.evictable());
        let metrics = self.pool.metrics();
        assert_eq!(
            metrics.allocations.blocks,
            metrics.allocations.freed_blocks
                + metrics.evictions.total()
                + (metrics.stats.used + metrics.stats.evictable) as u64,
            "{metrics:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 150 }, ..ProptestConfig::default() })]

    #[test]
    fn a_frame_pool_is_the_naive_pool(operations in vec(operation(), 1..120), first_read in 0..60_usize) {
        let mut world = World { pool: super::pool(FRAMES), model: Model::new(FRAMES) };
        for (done, operation) in operations.iter().enumerate() {
            world.run(operation);
            // An index without room for a key finds less than the model.
            if world.pool.cache_stats().forgotten_blocks > 0 {
                return Ok(());
            }
            world.compare();
            if done >= first_read {
                world.compare_order();
            }
        }
    }
}
