//! What is likeliest to be reused stays, by what was learned from requests so far.
//!
//! A conversation comes back after its user has read the answer; a one-off prompt never does; a system prompt comes every
//! second. LRU cannot tell them apart until it is too late. At release, a pool knows enough to tell: which turn this was,
//! how much of the prompt was new, how often each block was a hit. This policy learns from what becomes of blocks how
//! those [features](features) change their prospects ([`model`]), and how prospects change with age ([`ages`]); and evicts
//! what promises the fewest hits for the room and time that it takes.
//!
//! ```text
//! lookup    each hash:  noted as awaited?  a reuse at that age           model, ages learn
//!           a few notes:  still waiting                                  model, ages learn
//!           what the request is like                             ->      context
//! place     features  ->  score  ->  class, one queue each, least recently used first
//!           or, if even the best of it is worth less than what is being evicted:  the queue that goes first
//! victim    the head of each queue, scored anew: worth by class and age; the least goes
//! ```
//!
//! # Why it is not worse than LRU where there is nothing to learn
//!
//! With all weights zero there is one class, and that is one LRU queue. A class whose prospects do not differ from others'
//! gets their hazard; and what was never seen to be reused at some age counts as not reused then.
//!
//! # Admission
//!
//! Within a queue only the oldest can go, but where prospects rise with age, as they do while a user reads, the youngest is
//! worth least. So a block that starts below the *threshold*, a moving average of what the best candidates for eviction
//! were worth, is put where it goes before all others. If it is reused before that, nothing is lost. That is also what keeps
//! a part of a loop that is longer than the cache.
//!
//! Priorities and retention are not looked at: whoever asks for them wants [`Priority`](super::Priority).
//!
//! All state is in relaxed atomics, some updated by a load and a store: a thread's observation may be lost to another's.

mod ages;
mod awaited;
mod features;
mod model;

use std::fmt;

use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};

use ages::{Ages, CLASSES, bin, class_of};
use awaited::{Awaited, Wait};
use features::{Request, State, stands_for};
use model::Model;

use super::{Head, Lookup, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "foresight";

/// The queue of what was not admitted, after those of the classes.
const FIRST: usize = CLASSES;

/// Lookups between two computations of what blocks are worth.
const COMPUTE_LOOKUPS: u64 = 64;
/// Lookups after which the past counts half.
const FADE_LOOKUPS: u64 = 1 << 14;
/// How fast the threshold follows evictions.
const THRESHOLD_FOLLOWS: f32 = 1e-2;
/// A new block is judged as it will be at this part of the age at which blocks are being evicted: at age zero, what comes
/// twice in one moment makes everything look good.
const YOUNG: f32 = 1.0 / 8.0;
/// Reuses more than expected, or fewer, that one wait can teach.
const SURPLUS_MAX: f64 = 4.0;
/// Requests that the size of a usual one is taken over.
const REQUESTS_MEAN: u64 = 256;
/// What stands for less than this part of a usual request is not noted.
const NOTED_PART: f32 = 64.0;
/// The square of what a usual request counts as.
const REQUEST_WEIGHT: f64 = 32.0;
/// Releases by which the latest order may be behind.
const LATEST_SLACK: u64 = 16;

/// Evicts what promises the fewest hits for the room and time that it takes, as learned from the requests so far. See the
/// module's documentation for how.
pub struct Foresight {
    model: Model,
    ages: Ages,
    awaited: Awaited,
    lookups: AtomicU64,
    /// About the latest order of a release.
    latest: AtomicU64,
    /// Blocks of a usual request, a moving average, as the bits of an `f32`: what depends on numbers of blocks is the same
    /// for small blocks and large ones.
    request_blocks: AtomicU32,
    /// Moving averages over evictions, as bits of an `f32`: what the candidate worth least was worth, and its age.
    threshold: AtomicU32,
    evicted_age: AtomicU32,
}

impl Foresight {
    /// One that knows nothing yet, for a pool of at most so many blocks.
    pub fn new(blocks_max: usize) -> Self {
        Self {
            model: Model::new(),
            ages: Ages::new(),
            awaited: Awaited::new(blocks_max),
            lookups: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            request_blocks: AtomicU32::new(1f32.to_bits()),
            threshold: AtomicU32::new(0),
            evicted_age: AtomicU32::new(0),
        }
    }

    /// Learns from a wait up to an age, at the end of which the block was reused or not.
    fn count(&self, wait: Wait, age: u64, is_reused: bool) {
        // A chain has half its blocks behind one note, but is reused, or is not, as one: between the two.
        let part = f64::from(wait.blocks) / f64::from(figure(&self.request_blocks));
        let weight = (part * REQUEST_WEIGHT).sqrt();
        let score = self.model.score(wait.state);
        let class = class_of(score);
        let expected = self.ages.awaited(class, f64::from(score).exp(), weight, wait.from, age);
        if is_reused {
            self.ages.reused(class, weight, age);
        }
        let surplus = f64::from(u8::from(is_reused)) - expected.min(SURPLUS_MAX);
        self.model.learn(wait.state, (weight * surplus) as f32);
    }

    /// The age at which a new block is judged.
    fn young(&self) -> u64 {
        (figure(&self.evicted_age) * YOUNG) as u64
    }

    /// What a block is worth now, and its age.
    fn worth(&self, head: Head, latest: u64) -> (f32, u64) {
        let state = State(head.state);
        let age = state.age(latest);
        (self.ages.index(class_of(self.model.score(state)), age), age)
    }
}

fn figure(of: &AtomicU32) -> f32 {
    f32::from_bits(of.load(Relaxed))
}

/// Relaxed, and a store: what another thread saw in between is lost, one of many.
fn follow(average: &AtomicU32, figure: f32, by: f32) {
    let before = f32::from_bits(average.load(Relaxed));
    average.store((before + (figure - before) * by).to_bits(), Relaxed);
}

impl Policy for Foresight {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queues(&self) -> usize {
        CLASSES + 1
    }

    fn looked_up(&self, lookup: &mut Lookup<'_>, _now: Millis) -> u64 {
        let latest = self.latest.load(Relaxed);
        let lookups = self.lookups.fetch_add(1, Relaxed);
        if lookups % FADE_LOOKUPS == FADE_LOOKUPS - 1 {
            self.model.fade();
            self.ages.fade();
        }
        if lookups.is_multiple_of(COMPUTE_LOOKUPS) {
            self.ages.compute();
        }
        // At first the mean, then a moving average.
        let by = 1.0 / (lookups + 1).min(REQUESTS_MEAN) as f32;
        follow(&self.request_blocks, lookup.blocks.max(1) as f32, by);
        let (mut known, mut taken_up) = (lookup.hits, State::known(lookup.state));
        for (hash, block) in (&mut lookup.hashes).zip(1..) {
            if let Some(wait) = self.awaited.take(hash) {
                self.count(wait, wait.state.age(latest), true);
                if block > known {
                    (known, taken_up) = (block, Some(wait.state));
                }
            }
        }
        self.awaited.look_through(latest, |wait, age| self.count(wait, age, false));
        let taken_up = taken_up.map(|state| (state, bin(state.age(latest)) / 2));
        Request::new(lookup.blocks.saturating_sub(known), taken_up).0
    }

    fn place(&self, released: &Released, _now: Millis) -> Place {
        let &Released { order, depth, chain, .. } = released;
        let latest = self.latest.load(Relaxed);
        if order > latest.saturating_add(LATEST_SLACK) {
            // A store: an earlier order of another thread may overwrite it, and is soon overwritten in turn.
            self.latest.store(order, Relaxed);
        }
        let state = State::new(Request(released.context), order, released.hits, depth, chain);
        let request = figure(&self.request_blocks);
        let class = class_of(self.model.score_released(state, request));
        if let Some(blocks) = stands_for(depth, chain)
            && blocks as f32 * NOTED_PART >= request
            && let Some(wait) = self.awaited.note(released.hash, state, blocks, latest)
        {
            self.count(wait, wait.state.age(latest), false);
        }
        let is_admitted = self.ages.index(class, self.young()) >= figure(&self.threshold);
        let queue = if is_admitted { class } else { FIRST };
        Place { queue: queue as u8, rank: order, state: state.0 }
    }

    fn victim(&self, heads: &[Option<Head>], _now: Millis) -> Option<usize> {
        let latest = self.latest.load(Relaxed);
        let worth = |(queue, head): (usize, &Option<Head>)| Some((queue, self.worth((*head)?, latest)));
        let least = (heads.iter().take(CLASSES).enumerate().filter_map(worth))
            .min_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b));
        let first = heads.get(FIRST).copied().flatten();
        let young = self.young();
        match first.map(|first| (State(first.state), State(first.state).age(latest))) {
            // There is room for more than is admitted.
            Some((state, age)) if age > young => {
                let class = class_of(self.model.score(state));
                follow(&self.threshold, self.ages.index(class, young), THRESHOLD_FOLLOWS);
            }
            _ => {
                if let Some((_, (worth, age))) = least {
                    follow(&self.threshold, worth, THRESHOLD_FOLLOWS);
                    follow(&self.evicted_age, age as f32, THRESHOLD_FOLLOWS);
                }
            }
        }
        match (first, least) {
            (Some(_), _) => Some(FIRST),
            (_, Some((queue, _))) => Some(queue),
            _ => heads.iter().position(Option::is_some),
        }
    }
}

impl fmt::Debug for Foresight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foresight")
            .field("lookups", &self.lookups.load(Relaxed))
            .field("threshold", &figure(&self.threshold))
            .field("evicted_age", &figure(&self.evicted_age))
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
