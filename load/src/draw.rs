//! What generated requests are drawn from: lengths, times, and texts of fresh blocks.

use rand::Rng;
use rand_distr::{Distribution, LogNormal};

use crate::request::HASH_BLOCK_TOKENS;

/// A lognormal length or time: half of the values lie below the median, a sixth above `median *
/// e^sigma`.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub median: f64,
    pub sigma: f64,
    pub max: f64,
}

impl Spread {
    pub fn draw(self, rng: &mut impl Rng) -> f64 {
        // The constants are finite and the deviation is positive, as required.
        let spread = LogNormal::new(self.median.ln(), self.sigma).expect("a finite spread");
        spread.sample(rng).min(self.max)
    }

    pub fn draw_tokens(self, rng: &mut impl Rng) -> u32 {
        (self.draw(rng) as u32).max(1)
    }
}

/// A text: its length, and an id per block. The last block keeps its id when it is filled.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Prompt {
    pub tokens: u32,
    pub hash_ids: Vec<u64>,
}

impl Prompt {
    /// Creates a text that others begin with: the rest of its last block differs between them.
    pub fn shared(tokens: u32, ids: &mut HashIds) -> Self {
        let mut prompt = Self { tokens: 0, hash_ids: Vec::new() };
        prompt.extend(tokens, ids);
        prompt.hash_ids.truncate((prompt.tokens / HASH_BLOCK_TOKENS) as usize);
        prompt
    }

    /// Extends a text; every new block gets a new id.
    pub fn extend(&mut self, tokens: u32, ids: &mut HashIds) {
        self.tokens += tokens;
        let blocks = self.tokens.div_ceil(HASH_BLOCK_TOKENS) as usize;
        while self.hash_ids.len() < blocks {
            self.hash_ids.push(ids.0);
            ids.0 += 1;
        }
    }
}

/// Hash ids, numbered from zero.
#[derive(Default)]
pub(crate) struct HashIds(u64);
