//! A trace as lists of small numbers.

use std::collections::HashMap;

use crate::trace::{HASH_BLOCK_TOKENS, Request, Trace};

/// The prompts of a trace by arrival. Its distinct blocks are numbered from 0, by their first
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
    /// Its blocks, first block first.
    pub blocks: Vec<u32>,
}

impl Prompts {
    /// The prompts of a trace; `None` if it does not say which prompts begin alike.
    pub fn new(trace: &Trace) -> Option<Self> {
        if trace.has_no_hash_ids() {
            return None;
        }
        let prompt = |request: &Request| {
            // Where the ids go on through the answer: of the one in which the prompt ends, nobody has had the rest.
            let goes_on = request.hashed_tokens > request.input_tokens;
            let whole = (request.input_tokens / HASH_BLOCK_TOKENS) as usize;
            if goes_on { whole } else { request.hash_ids.len() }
        };
        let requests = trace
            .requests
            .iter()
            .map(|request| (request.arrival.as_millis() as u64, &request.hash_ids[..prompt(request)]));
        Some(Self::of(requests))
    }

    /// The same from times in milliseconds and ids.
    pub(super) fn of<'a>(requests: impl Iterator<Item = (u64, &'a [u64])>) -> Self {
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

    /// Requests.
    pub fn requests(&self) -> usize {
        self.prompts.len()
    }

    /// Distinct blocks.
    pub fn distinct(&self) -> usize {
        self.distinct
    }

    /// Blocks of all prompts.
    pub fn total(&self) -> usize {
        self.total
    }

    /// A share of the distinct blocks, at least one.
    pub fn capacity(&self, share: f64) -> usize {
        ((self.distinct as f64 * share).round() as usize).max(1)
    }
}
