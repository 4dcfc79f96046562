//! The likelihood of a block's reuse, relative to other blocks, from its features.
//!
//! The score of a block is a sum of weights, one for the value of each feature and of some pairs,
//! less the mean over all released blocks. The exponential of the score is the block's *risk*: the
//! rate of reuse of such blocks, at any age, relative to the average block. This is a
//! proportional-hazards model (Cox, 1972).
//!
//! A weight follows the gradient of the likelihood, which for an awaited block is reuses seen less
//! reuses expected, by steps that shrink with the sum of squared gradients (AdaGrad, 2011).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::features::{ALL, Feature, GAP, HITS, NEW, State, TAIL, TURN, VALUES};

/// Pairs of features that have a weight for each pair of values.
const PAIRS: [(Feature, Feature); 6] =
    [(HITS, TURN), (TURN, NEW), (HITS, NEW), (TAIL, NEW), (TURN, GAP), (HITS, GAP)];

const TERMS: usize = ALL.len() + PAIRS.len();
const WEIGHTS: usize = ALL.len() * VALUES + PAIRS.len() * VALUES * VALUES;

/// Requests in the moving average of the score.
const MEAN_REQUESTS: f32 = 256.0;

/// The bound of scores: risks are between 1/400 and 400.
const SCORE_MAX: f32 = 6.0;

/// A weight (low half) and the sum of its squared gradients (high half), an `f32` each.
struct Weight(AtomicU64);

/// Scores that are kept, a power of two.
const MEMOS: usize = 256;

/// Weights learned from the later use of blocks.
pub(super) struct Model {
    weights: Box<[Weight]>,
    /// Scores by what they depend on, with that in the high half and the score, an `f32`, in the
    /// low half; 0: none. The blocks of a chain share one or two of them, and most releases find
    /// theirs. Forgotten at intervals, because weights change.
    memos: Box<[AtomicU64]>,
    /// The first step of a weight. A block's score moves by up to [`TERMS`] steps at once.
    step: f32,
    /// The mean score of released blocks, as the bits of an `f32`.
    mean: AtomicU32,
}

/// Returns the indices of the weights of a block's score. The tail counts only as zero or not: all
/// blocks behind a block need it, so a block nearer to the beginning of a chain must not score
/// less.
fn terms(state: State) -> [usize; TERMS] {
    let value = |feature: Feature| {
        let value = state.get(feature);
        if feature.is(TAIL) { value.min(1) } else { value }
    };
    std::array::from_fn(|term| match term.checked_sub(ALL.len()) {
        None => term * VALUES + value(ALL[term]),
        Some(pair) => {
            let (a, b) = PAIRS[pair];
            ALL.len() * VALUES + (pair * VALUES + value(a)) * VALUES + value(b)
        }
    })
}

impl Weight {
    fn parts(&self) -> (f32, f32) {
        // Relaxed: statistics.
        let bits = self.0.load(Relaxed);
        (f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32))
    }

    fn set(&self, weight: f32, squares: f32) {
        // Relaxed, and a store: a concurrent step may be lost.
        self.0.store(u64::from(squares.to_bits()) << 32 | u64::from(weight.to_bits()), Relaxed);
    }
}

impl Model {
    /// Creates a model with all weights zero.
    pub(super) fn new(step: f32) -> Self {
        Self {
            step,
            weights: (0..WEIGHTS).map(|_| Weight(AtomicU64::new(0))).collect(),
            memos: (0..MEMOS).map(|_| AtomicU64::new(0)).collect(),
            mean: AtomicU32::new(0f32.to_bits()),
        }
    }

    /// Returns the logarithm of a block's risk.
    pub(super) fn score(&self, state: State) -> f32 {
        self.sum(state) - f32::from_bits(self.mean.load(Relaxed))
    }

    /// Returns the score as it was at most one [`forget`](Self::forget) ago.
    pub(super) fn recent_score(&self, state: State) -> f32 {
        let key = state.score_key();
        let memo = &self.memos[(key.wrapping_mul(0x9e37_79b9) >> 24) as usize % MEMOS];
        // Relaxed: one word has the key and the score.
        let found = memo.load(Relaxed);
        if found >> 32 == u64::from(key) {
            return f32::from_bits(found as u32);
        }
        let score = self.score(state);
        memo.store(u64::from(key) << 32 | u64::from(score.to_bits()), Relaxed);
        score
    }

    /// Forgets the recent scores.
    pub(super) fn forget(&self) {
        self.memos.iter().for_each(|memo| memo.store(0, Relaxed));
    }

    /// Counts released blocks in the mean score: `part` of those of a usual request.
    pub(super) fn count_released(&self, state: State, part: f32) {
        let (sum, mean) = (self.sum(state), f32::from_bits(self.mean.load(Relaxed)));
        // Relaxed, and a store: as for a weight.
        self.mean.store((mean + (sum - mean) * (part / MEAN_REQUESTS).min(1.0)).to_bits(), Relaxed);
    }

    fn sum(&self, state: State) -> f32 {
        let sum: f32 = terms(state).iter().map(|&term| self.weights[term].parts().0).sum();
        sum.clamp(-SCORE_MAX, SCORE_MAX)
    }

    /// Learns that blocks of this state had `surplus` more reuses than expected.
    pub(super) fn learn(&self, state: State, surplus: f32) {
        for term in terms(state) {
            let weight = &self.weights[term];
            let (value, squares) = weight.parts();
            let squares = squares + surplus * surplus;
            weight.set(value + self.step * surplus / (squares + 1.0).sqrt(), squares);
        }
    }

    /// Halves the weight of past observations.
    pub(super) fn fade(&self) {
        for weight in &self.weights {
            let (value, squares) = weight.parts();
            weight.set(value, squares / 2.0);
        }
    }
}
