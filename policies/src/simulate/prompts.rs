//! The prompts of a trace as lists of small numbers.

use std::collections::HashMap;

/// The prompts of a trace, by arrival. Distinct blocks are numbered from 0 by their first
/// appearance. An id after another block is another block, as in a pool. So a block is used
/// whenever one after it is: the clairvoyant bound holds only then.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Prompts {
    pub(super) prompts: Vec<Prompt>,
    distinct: usize,
    total: usize,
}

/// A request's prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Prompt {
    /// Milliseconds since the first request.
    pub at_ms: u64,
    /// The blocks, first block first.
    pub blocks: Vec<u32>,
}

impl Prompts {
    /// Creates prompts from arrivals in milliseconds and ids of blocks, where equal ids after equal
    /// blocks mean equal blocks.
    pub fn of<'a>(requests: impl Iterator<Item = (u64, &'a [u64])>) -> Self {
        let mut numbers = HashMap::new();
        let mut blocks = |ids: &[u64]| {
            let mut before = None;
            let mut number = |id: &u64| {
                let next = numbers.len() as u32;
                let number = *numbers.entry((before, *id)).or_insert(next);
                before = Some(number);
                number
            };
            ids.iter().map(&mut number).collect()
        };
        let prompts: Vec<Prompt> =
            requests.map(|(at_ms, ids)| Prompt { at_ms, blocks: blocks(ids) }).collect();
        let total = prompts.iter().map(|prompt| prompt.blocks.len()).sum();
        Self { prompts, distinct: numbers.len(), total }
    }

    /// Returns the number of requests.
    pub fn requests(&self) -> usize {
        self.prompts.len()
    }

    /// Returns the number of distinct blocks.
    pub fn distinct(&self) -> usize {
        self.distinct
    }

    /// Returns the number of blocks of all prompts.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns a share of the distinct blocks, at least one.
    pub fn capacity(&self, share: f64) -> usize {
        ((self.distinct as f64 * share).round() as usize).max(1)
    }
}
