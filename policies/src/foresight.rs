//! Learns from past requests which blocks are likely to be reused.
//!
//! A conversation continues after its user has read the answer; a one-off prompt never returns; a
//! system prompt returns every second. LRU tells them apart too late. At release a pool knows which
//! turn of a conversation this was, how much of the prompt was new, and how often each block was a
//! hit. This policy learns from the later use of blocks how these [features](features) change their
//! prospects ([`model`]) and how prospects change with age ([`ages`]). It evicts the block with the
//! fewest expected hits per unit of room and time.
//!
//! ```text
//! lookup    each hash:  noted as awaited?  a reuse at that age           model, ages learn
//!           a few notes:  still waiting                                  model, ages learn
//!           what the request is like                             ->      context
//!           noted blocks that are reused: which order had kept them?     duel learns
//! place     features  ->  score  ->  class, one queue each, least recently used first
//!           or, if even the best of it is worth less than what is being evicted:  the queue that goes first
//! victim    while the duel is won: the head of each queue, worth by class and age; the least goes
//!           else: the head that was released first
//! ```
//!
//! # LRU, unless that is worse
//!
//! The [duel] compares both orders on the noted blocks, and LRU evicts unless the order by worth
//! gains significantly. Each queue is in the order of releases, so the head that was released first
//! is exactly LRU's victim, and a change of the order moves no block.
//!
//! With all weights zero there is one class, which is one LRU queue. A class without evidence of
//! its own gets the hazard of all classes. An age at which no reuse was seen counts as an age
//! without reuse.
//!
//! # Costs
//!
//! The blocks of a chain share one or two scores, which are kept between releases. Heads are judged
//! by their queue, without a score. One in eight evictions writes to shared words, and one in 16
//! releases; no call applies a read-modify-write per block. The notes fit into a core's cache.
//!
//! # Admission
//!
//! Within a queue only the oldest block can be evicted, but where prospects rise with age, as they
//! do while a user reads, the youngest is worth least. A block that starts below the *threshold*, a
//! moving average of the worth of the best candidates for eviction, is therefore placed in a queue
//! that is evicted before all others. A reuse before that loses nothing. Admission also keeps a
//! part of a loop that is longer than the cache.
//!
//! Priorities and retention are ignored; [`PriorityLru`](kvpool::prefix::policy::PriorityLru)
//! implements them.
//!
//! All state is in relaxed atomics, some updated by a load and a store: concurrent threads may lose
//! an observation.

mod ages;
mod awaited;
mod duel;
mod features;
mod model;

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use kvpool::prefix::policy::{Head, Lookup, Millis, Place, Policy, Released};

use ages::{Ages, CLASSES, bin, class_of};
use awaited::{Awaited, Wait};
use duel::Duel;
use features::{Request, State, stands_for};
use model::Model;

/// The name by which the policy is chosen.
pub(crate) const NAME: &str = "foresight";

/// The queue of blocks that were not admitted, after the queues of the classes.
const FIRST: usize = CLASSES;

/// Lookups between two computations of the worth of blocks.
const COMPUTE_LOOKUPS: u64 = 64;
/// Lookups after which past observations count half.
const FADE_LOOKUPS: u64 = 1 << 14;
/// One in so many evictions counts in the moving averages, which all threads write, and its weight.
const SAMPLED_EVICTIONS: u64 = 8;
const THRESHOLD_FOLLOWS: f32 = 8e-2;
/// New blocks are judged at this part of the current eviction age. At age zero, prompts that arrive
/// twice in one moment would make every block look good.
const YOUNG: f32 = 1.0 / 8.0;
/// The largest difference between expected and seen reuses that one wait can teach.
const SURPLUS_MAX: f64 = 4.0;
/// Requests in the moving average of the request size.
const REQUESTS_MEAN: u64 = 256;
/// Blocks that stand for less than this fraction (1 in `NOTED_PART`) of a usual request are not
/// noted.
const NOTED_PART: f32 = 64.0;
/// The square of the weight of a usual request.
const REQUEST_WEIGHT: f64 = 32.0;
/// The largest lag of `latest`, in releases.
const LATEST_SLACK: u64 = 16;

/// The constants of [`Foresight`] that were chosen by measurements.
///
/// The defaults are chosen on the workloads of `simulate`; the crate's example `left_out` shows
/// what they are worth on workloads on which they were not chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tuning {
    /// The first step of a weight of the model.
    pub step: f32,
    /// The weight of the hazard of all classes in the hazard of one class, in reuses.
    pub class_guess: f64,
    /// Lookups over which the gain over LRU is averaged.
    pub memory_lookups: f32,
    /// The size, relative to the pool, of the LRU cache that must be surpassed.
    pub margin: f64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { step: 0.015, class_guess: 20.0, memory_lookups: 256.0, margin: 1.15 }
    }
}

/// Evicts the block with the fewest expected hits per unit of room and time, learned from past
/// requests.
///
/// At release, the features of a block (hits, turn of the conversation, new blocks of the prompt,
/// length of the chain, position) give a score from weights learned online: a proportional-hazards
/// model (Cox, 1972). The score selects one of seven classes, a queue each; age is counted in
/// blocks released since. At eviction, the head worth least by class and age goes: its worth is a
/// Gittins index (Gittins, 1979) over the hazards seen at each age. A block that starts below the
/// worth of current victims is evicted before all others. The policy is LRU until this order has
/// more hits on sampled blocks, and again when it no longer has. Priorities and retention are
/// ignored.
pub struct Foresight {
    model: Model,
    ages: Ages,
    awaited: Awaited,
    duel: Duel,
    lookups: AtomicU64,
    /// The latest order of a release, approximately.
    latest: AtomicU64,
    /// Moving average of the blocks of a request, as the bits of an `f32`. Thresholds relative to
    /// it do not depend on the size of blocks.
    request_blocks: AtomicU32,
    /// Moving averages over evictions, as the bits of an `f32`: the worth of the candidate worth
    /// least, and its age.
    threshold: AtomicU32,
    evicted_age: AtomicU32,
}

impl Foresight {
    /// Creates a policy without observations, for a pool of at most `blocks_max` blocks.
    pub fn new(blocks_max: usize) -> Self {
        Self::tuned(blocks_max, Tuning::default())
    }

    /// Creates a policy with other constants than the default ones.
    pub fn tuned(blocks_max: usize, tuning: Tuning) -> Self {
        Self {
            model: Model::new(tuning.step),
            ages: Ages::new(tuning.class_guess),
            awaited: Awaited::new(blocks_max),
            duel: Duel::new(tuning.memory_lookups, tuning.margin),
            lookups: AtomicU64::new(0),
            latest: AtomicU64::new(0),
            request_blocks: AtomicU32::new(1f32.to_bits()),
            threshold: AtomicU32::new(0),
            evicted_age: AtomicU32::new(0),
        }
    }

    /// Learns from a wait up to `age`, at the end of which the block was reused or not.
    fn count(&self, wait: Wait, age: u64, is_reused: bool) {
        // Half of a chain's blocks are behind one note, but the chain is reused as a whole or not
        // at all. The square root is between the two weights.
        let part = f64::from(wait.blocks) / f64::from(figure(&self.request_blocks));
        self.duel.waited(wait.queue, part, wait.from, age);
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

    /// Follows the averages at an eviction, where the head of class `least` is worth least.
    fn evicts(&self, heads: &[Option<Head>], least: Option<(usize, f32, u64)>, latest: u64) {
        let age = |head: &Option<Head>| head.map(|head| State(head.state).age(latest));
        self.duel.evicts(heads.iter().map(age), latest);
        let (young, first) = (self.young(), heads.get(FIRST).copied().flatten());
        match (first.map(|first| State(first.state)), least) {
            // The cache has room for more blocks than are admitted.
            (Some(state), _) if state.age(latest) > young => {
                let class = class_of(self.model.recent_score(state));
                follow(&self.threshold, self.ages.index(class, young), THRESHOLD_FOLLOWS);
            }
            (_, Some((_, worth, age))) => {
                follow(&self.threshold, worth, THRESHOLD_FOLLOWS);
                follow(&self.evicted_age, age as f32, THRESHOLD_FOLLOWS);
            }
            _ => {}
        }
    }

    /// Returns the age at which a new block is judged.
    fn young(&self) -> u64 {
        (figure(&self.evicted_age) * YOUNG) as u64
    }
}

/// Returns the value of an `f32` that is stored as bits.
fn figure(of: &AtomicU32) -> f32 {
    f32::from_bits(of.load(Relaxed))
}

/// Moves an average towards `figure`. Relaxed, and a store: a concurrent observation may be lost.
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
            self.model.forget();
        }
        // The mean of the first requests, then a moving average.
        let by = 1.0 / (lookups + 1).min(REQUESTS_MEAN) as f32;
        follow(&self.request_blocks, lookup.blocks.max(1) as f32, by);
        let (mut known, mut taken_up) = (lookup.hits, State::known(lookup.state));
        let mut round = Duel::begin();
        for (hash, block) in (&mut lookup.hashes).zip(1..) {
            if let Some(wait) = self.awaited.take(hash) {
                let age = wait.state.age(latest);
                let part = wait.blocks as f32 / figure(&self.request_blocks);
                self.duel.reused(&mut round, wait.queue, part, age, latest);
                self.count(wait, age, true);
                if block > known {
                    (known, taken_up) = (block, Some(wait.state));
                }
            }
        }
        self.duel.end(round, lookups, &self.ages, latest);
        self.awaited.look_through(latest, |wait, age| self.count(wait, age, false));
        let taken_up = taken_up.map(|state| (state, bin(state.age(latest)) / 2));
        Request::new(lookup.blocks.saturating_sub(known), taken_up).0
    }

    fn place(&self, released: &Released, _now: Millis) -> Place {
        let &Released { order, depth, chain, .. } = released;
        let latest = self.latest.load(Relaxed);
        if order > latest.saturating_add(LATEST_SLACK) {
            // A store: another thread may overwrite it with an earlier order, until the next
            // release.
            self.latest.store(order, Relaxed);
        }
        let state = State::new(Request(released.context), order, released.hits, depth, chain);
        let request = figure(&self.request_blocks);
        let class = class_of(self.model.recent_score(state));
        let is_admitted = self.ages.index(class, self.young()) >= figure(&self.threshold);
        let queue = if is_admitted { class } else { FIRST };
        if let Some(blocks) = stands_for(depth, chain)
            && blocks as f32 * NOTED_PART >= request
        {
            self.model.count_released(state, blocks as f32 / request);
            let wait = Wait { state, blocks, queue, from: 0 };
            if let Some(wait) = self.awaited.note(released.hash, wait, latest) {
                self.count(wait, wait.state.age(latest), false);
            }
        }
        Place { queue: queue as u8, rank: order, state: state.0 }
    }

    fn victim(&self, heads: &[Option<Head>], _now: Millis) -> Option<usize> {
        let latest = self.latest.load(Relaxed);
        let first = heads.get(FIRST).copied().flatten();
        let is_sampled = |head: Head| head.rank.is_multiple_of(SAMPLED_EVICTIONS);
        let is_by_worth = self.duel.is_by_worth();
        let oldest =
            || heads.iter().enumerate().filter_map(|(queue, head)| Some((head.as_ref()?.rank, queue))).min();
        let chosen = if is_by_worth { first.map(|_| FIRST) } else { oldest().map(|(_, queue)| queue) };
        if let Some(queue) = chosen
            && !heads[queue].is_some_and(is_sampled)
        {
            return Some(queue);
        }
        let mut least: Option<(usize, f32, u64)> = None;
        for (class, head) in heads.iter().take(CLASSES).enumerate() {
            let Some(head) = head else { continue };
            let age = State(head.state).age(latest);
            let worth = self.ages.index(class, age);
            if least.is_none_or(|(_, lowest, _)| worth < lowest) {
                least = Some((class, worth, age));
            }
        }
        let queue =
            chosen.or(least.map(|(class, ..)| class)).or_else(|| heads.iter().position(Option::is_some));
        if queue.is_some_and(|queue| heads[queue].is_some_and(is_sampled)) {
            self.evicts(heads, least, latest);
        }
        queue
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

#[cfg(test)]
mod tests;
