//! Whether the order of evictions by worth pays, compared with the order of releases.
//!
//! One of the two orders decides which blocks are evicted. For the other one a *frontier* is
//! estimated: the oldest age up to which it would keep the blocks of each queue. Whenever a
//! [noted](super::awaited) block is reused, both frontiers say whether the block would have been a
//! hit. The sum of the differences, recent ones first, decides which order evicts.
//!
//! | frontier | of the order that evicts | of the other |
//! |---|---|---|
//! | releases | the oldest head of all queues | the age at which as many blocks are younger as the pool keeps |
//! | worth | the head of each queue | the bins that remain when those worth least are dropped until the pool has room |
//!
//! How many blocks wait at an age is known from their exposure, in proportion: the noted blocks
//! times the time that they waited at that age. The same sums measure the pool's own content, so
//! the factor cancels. A pool whose running requests took all blocks for a moment kept nothing
//! older than that moment by any order, so frontiers, as orders of release, never fall.
//!
//! Blocks that were reused have the same hits in both orders where both keep them, so only the
//! disagreements count, and few requests are enough to tell.

use std::array;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::ages::{Ages, BINS, CLASSES, Sum, begins, bin, parts};
use super::{FIRST, figure, follow};

/// Queues: the classes, and the blocks that go first.
pub(super) const QUEUES: usize = CLASSES + 1;

/// Lookups after which past exposure counts half.
const FADE_LOOKUPS: u64 = 512;
/// Lookups between two estimates of the frontiers.
const ESTIMATE_LOOKUPS: u64 = 8;
/// The gain from which the order by worth evicts, in standard deviations.
const GAIN_MIN: f32 = 2.0;

/// The blocks that an order keeps.
struct Frontier {
    /// The oldest age of each queue.
    ages: [AtomicU64; QUEUES],
    /// The lowest order of each queue.
    orders: [AtomicU64; QUEUES],
}

/// The blocks of one lookup that both orders would have kept, and the difference so far.
#[derive(Clone, Copy)]
pub(super) struct Round {
    pub by_worth: bool,
    pub by_release: bool,
    pub gain: f32,
}

/// See the [module](self).
pub(super) struct Duel {
    /// Lookups over which gains are averaged.
    memory_lookups: f32,
    /// The size, relative to the pool, of the cache in the order of releases.
    margin: f64,
    /// Noted blocks times time, by queue and age.
    exposure: [[Sum; BINS]; QUEUES],
    by_worth: Frontier,
    by_release: Frontier,
    /// Averages over lookups, as the bits of an `f32`: the gain, and its square.
    gain: AtomicU32,
    square: AtomicU32,
    is_by_worth: AtomicBool,
}

impl Frontier {
    fn new() -> Self {
        Self { ages: array::from_fn(|_| AtomicU64::new(0)), orders: array::from_fn(|_| AtomicU64::new(0)) }
    }

    fn set(&self, queue: usize, age: u64, latest: u64) {
        self.ages[queue].store(age, Relaxed);
        let order = latest.saturating_sub(age);
        if self.orders[queue].load(Relaxed) < order {
            self.orders[queue].store(order, Relaxed);
        }
    }

    fn keeps(&self, queue: usize, age: u64, latest: u64) -> bool {
        let order = self.orders[queue].load(Relaxed);
        age <= self.ages[queue].load(Relaxed) && age <= latest.saturating_sub(order)
    }
}

impl Duel {
    pub(super) fn new(memory_lookups: f32, margin: f64) -> Self {
        Self {
            memory_lookups,
            margin,
            exposure: array::from_fn(|_| array::from_fn(|_| Sum::new())),
            by_worth: Frontier::new(),
            by_release: Frontier::new(),
            gain: AtomicU32::new(0),
            square: AtomicU32::new(0),
            is_by_worth: AtomicBool::new(false),
        }
    }

    /// Returns whether blocks are evicted by worth.
    pub(super) fn is_by_worth(&self) -> bool {
        self.is_by_worth.load(Relaxed)
    }

    /// Counts `weight` blocks of a queue that waited between two ages.
    pub(super) fn waited(&self, queue: usize, weight: f64, from: u64, to: u64) {
        parts(from, to, |bin, time| self.exposure[queue][bin].add(weight * time));
    }

    /// Begins a lookup.
    pub(super) const fn begin() -> Round {
        Round { by_worth: true, by_release: true, gain: 0.0 }
    }

    /// Counts `weight` blocks that are reused at an age, the first of a prompt first: without them
    /// no later block of the prompt is a hit.
    pub(super) fn reused(&self, round: &mut Round, queue: usize, weight: f32, age: u64, latest: u64) {
        round.by_worth &= self.by_worth.keeps(queue, age, latest);
        round.by_release &= self.by_release.keeps(queue, age, latest);
        round.gain += weight * (f32::from(u8::from(round.by_worth)) - f32::from(u8::from(round.by_release)));
    }

    /// Ends a lookup, and decides which order evicts from now on.
    pub(super) fn end(&self, round: Round, lookups: u64, ages: &Ages, latest: u64) {
        follow(&self.gain, round.gain, 1.0 / self.memory_lookups);
        follow(&self.square, round.gain * round.gain, 1.0 / self.memory_lookups);
        let (gain, square) = (figure(&self.gain), figure(&self.square));
        let is_by_worth = self.is_by_worth();
        let least = if is_by_worth { 0.0 } else { GAIN_MIN * (square / self.memory_lookups).sqrt() };
        if (gain > least) != is_by_worth {
            self.is_by_worth.store(!is_by_worth, Relaxed);
        }
        if lookups.is_multiple_of(ESTIMATE_LOOKUPS) {
            self.estimate(ages, latest);
        }
        if lookups.is_multiple_of(FADE_LOOKUPS) {
            self.exposure.iter().flatten().for_each(Sum::halve);
        }
    }

    /// Notes the ages of the heads of all queues, none for an empty one, at an eviction.
    pub(super) fn evicts(&self, heads: impl Iterator<Item = Option<u64>> + Clone, latest: u64) {
        if self.is_by_worth() {
            for (queue, age) in heads.enumerate().take(QUEUES) {
                self.by_worth.set(queue, age.unwrap_or(0), latest);
            }
        } else {
            let oldest = heads.flatten().max().unwrap_or(0);
            (0..QUEUES).for_each(|queue| self.by_release.set(queue, oldest, latest));
        }
    }

    /// Estimates the frontiers of the order that does not evict.
    fn estimate(&self, ages: &Ages, latest: u64) {
        let exposure: [[f64; BINS]; QUEUES] =
            array::from_fn(|queue| array::from_fn(|bin| self.exposure[queue][bin].get()));
        let evicts = if self.is_by_worth() { &self.by_worth } else { &self.by_release };
        let mut room = 0.0;
        for (queue, exposure) in exposure.iter().enumerate() {
            let order = evicts.orders[queue].load(Relaxed);
            let age = evicts.ages[queue].load(Relaxed).min(latest.saturating_sub(order));
            let last = bin(age);
            room += exposure[..last].iter().sum::<f64>() + exposure[last] * fraction(last, age);
        }
        if self.is_by_worth() {
            room *= self.margin;
            let mut age = begins(BINS - 1);
            for bin in 0..BINS - 1 {
                let here: f64 = exposure.iter().map(|exposure| exposure[bin]).sum();
                if here >= room {
                    age = begins(bin) + (begins(bin + 1) - begins(bin)) * room / here.max(1e-9);
                    break;
                }
                room -= here;
            }
            (0..QUEUES).for_each(|queue| self.by_release.set(queue, age as u64, latest));
        } else {
            let kept = kept_by_worth(&exposure, room / self.margin, ages);
            (0..QUEUES).for_each(|queue| self.by_worth.set(queue, kept[queue] as u64, latest));
        }
    }
}

/// Returns the part of a bin that is younger than an age in it.
fn fraction(bin: usize, age: u64) -> f64 {
    ((age as f64 - begins(bin)) / (begins(bin + 1) - begins(bin))).clamp(0.0, 1.0)
}

/// Returns the oldest age of each queue that is kept where the oldest of the queue that is worth
/// least goes until `room` is left.
pub(super) fn kept_by_worth(exposure: &[[f64; BINS]; QUEUES], room: f64, ages: &Ages) -> [f64; QUEUES] {
    let mut surplus = exposure.iter().flatten().sum::<f64>() - room - exposure[FIRST].iter().sum::<f64>();
    let mut kept: [f64; QUEUES] = array::from_fn(|queue| if queue == FIRST { 0.0 } else { begins(BINS) });
    if surplus < 0.0 {
        // There is room for some of those that go first.
        let first: f64 = exposure[FIRST].iter().sum();
        let mut left = -surplus;
        kept[FIRST] = begins(BINS);
        for (bin, &here) in exposure[FIRST].iter().enumerate() {
            if here >= left && left < first {
                kept[FIRST] = begins(bin) + (begins(bin + 1) - begins(bin)) * left / here.max(1e-9);
                break;
            }
            left -= here;
        }
        return kept;
    }
    let mut last = [BINS; CLASSES];
    while surplus > 0.0 {
        let worth = |class: &usize| ages.index_of_bin(*class, last[*class] - 1);
        let Some(class) =
            (0..CLASSES).filter(|&class| last[class] > 0).min_by(|a, b| worth(a).total_cmp(&worth(b)))
        else {
            break;
        };
        let bin = last[class] - 1;
        let here = exposure[class][bin];
        let gone = if here > surplus { surplus / here } else { 1.0 };
        kept[class] = begins(bin + 1) - (begins(bin + 1) - begins(bin)) * gone;
        surplus -= here;
        last[class] = bin;
    }
    kept
}
