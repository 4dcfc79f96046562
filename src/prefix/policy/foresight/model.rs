//! How much likelier than others a block is to be reused, from its features.
//!
//! The score of a block is a sum of weights, one for the value of each feature and of some pairs, less the mean over all
//! blocks released; its *risk* is the exponential of that: how often blocks like it are reused, at any age, against the
//! average block. That is a proportional-hazards model (Cox, 1972).
//!
//! A weight follows the gradient of the likelihood: for a block that was awaited for some time, reuses seen less reuses
//! expected, by steps that shrink as its gradients add up (AdaGrad, 2011).

use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::features::{ALL, Feature, GAP, HITS, NEW, State, TAIL, TURN, VALUES};

/// Pairs of features whose values together say more than each alone.
const PAIRS: [(Feature, Feature); 6] =
    [(HITS, TURN), (TURN, NEW), (HITS, NEW), (TAIL, NEW), (TURN, GAP), (HITS, GAP)];

const TERMS: usize = ALL.len() + PAIRS.len();
const WEIGHTS: usize = ALL.len() * VALUES + PAIRS.len() * VALUES * VALUES;

/// The first step of a weight. A block's score moves by up to [`TERMS`] of them at once.
const STEP: f32 = 0.03;

/// Requests that the mean is taken over.
const MEAN_REQUESTS: f32 = 256.0;

/// Scores are bounded: a risk between a four-hundredth and four hundred.
const SCORE_MAX: f32 = 6.0;

/// A weight and the sum of its squared gradients, an `f32` each: weight low, sum high.
struct Weight(AtomicU64);

/// Weights learned from what became of blocks.
pub(super) struct Model {
    weights: Box<[Weight]>,
    /// The mean score of blocks released, as the bits of an `f32`.
    mean: AtomicU32,
}

/// The weights that a block's score is the sum of. Of what lies behind a block only whether there is anything: a block is
/// needed by all that is behind it, so what is nearer to the beginning of the same chain must not score less.
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
        // Relaxed, and a store: what another thread learned in between is lost, one step of many.
        self.0.store(u64::from(squares.to_bits()) << 32 | u64::from(weight.to_bits()), Relaxed);
    }
}

impl Model {
    /// One that finds all blocks alike.
    pub(super) fn new() -> Self {
        Self {
            weights: (0..WEIGHTS).map(|_| Weight(AtomicU64::new(0))).collect(),
            mean: AtomicU32::new(0f32.to_bits()),
        }
    }

    /// The logarithm of a block's risk.
    pub(super) fn score(&self, state: State) -> f32 {
        self.sum(state) - f32::from_bits(self.mean.load(Relaxed))
    }

    /// The same for a block that is released: one of those that the mean is taken over. `request`: blocks of a usual request.
    pub(super) fn score_released(&self, state: State, request: f32) -> f32 {
        let (sum, mean) = (self.sum(state), f32::from_bits(self.mean.load(Relaxed)));
        let mean = mean + (sum - mean) / (request * MEAN_REQUESTS);
        // Relaxed, and a store: as for a weight.
        self.mean.store(mean.to_bits(), Relaxed);
        sum - mean
    }

    fn sum(&self, state: State) -> f32 {
        let sum: f32 = terms(state).iter().map(|&term| self.weights[term].parts().0).sum();
        sum.clamp(-SCORE_MAX, SCORE_MAX)
    }

    /// Blocks like this were reused so much more often than expected.
    pub(super) fn learn(&self, state: State, surplus: f32) {
        for term in terms(state) {
            let weight = &self.weights[term];
            let (value, squares) = weight.parts();
            let squares = squares + surplus * surplus;
            weight.set(value + STEP * surplus / (squares + 1.0).sqrt(), squares);
        }
    }

    /// Trusts the past half as much as before.
    pub(super) fn fade(&self) {
        for weight in &self.weights {
            let (value, squares) = weight.parts();
            weight.set(value, squares / 2.0);
        }
    }
}
