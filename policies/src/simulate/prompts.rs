//! The requests of a trace as lists of small numbers.

use std::collections::HashMap;

use super::turns::{Turn, Turns};

/// The prompts of a trace, by arrival, and the answers to them.
///
/// Distinct blocks are numbered from 0 by their first appearance. An id after another block is
/// another block, as in a pool. So a block is used whenever one after it is: the clairvoyant bound
/// holds only then.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Prompts {
    pub(super) prompts: Vec<Prompt>,
    distinct: usize,
    total: usize,
    numbers: usize,
}

/// A request as it is in a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Arrival<'a> {
    /// Milliseconds since any fixed time.
    pub at_ms: u64,
    /// Ids of the blocks of the prompt; equal ids after equal blocks mean equal blocks.
    pub prompt: &'a [u64],
    /// Ids of the blocks that the answer adds, as a later prompt would repeat them.
    pub answer: &'a [u64],
    /// Blocks that the answer adds beyond those, which no prompt repeats.
    pub own: usize,
    /// Milliseconds from the start of the request until its prompt is computed.
    pub prompt_ms: u64,
    /// Milliseconds from there to its end.
    pub answer_ms: u64,
    /// Its place in a session, if it has one.
    pub turn: Option<Turn>,
}

/// A request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Prompt {
    /// Milliseconds since the first request.
    pub at_ms: u64,
    /// The blocks of the prompt, first block first.
    pub blocks: Vec<u32>,
    /// The blocks that the answer adds.
    pub answer: Vec<u32>,
    /// As in [`Arrival`].
    pub prompt_ms: u64,
    pub answer_ms: u64,
    pub turn: Option<Turn>,
}

impl Prompts {
    /// Creates prompts without answers, of requests that take no time, from arrivals in
    /// milliseconds and ids of blocks.
    pub fn of<'a>(requests: impl Iterator<Item = (u64, &'a [u64])>) -> Self {
        Self::of_arrivals(requests.map(|(at_ms, prompt)| Arrival { at_ms, prompt, ..Arrival::default() }))
    }

    /// Creates the prompts of requests, in the order of their arrival.
    pub fn of_arrivals<'a>(arrivals: impl Iterator<Item = Arrival<'a>>) -> Self {
        let mut numbers = HashMap::new();
        let mut in_prompts = Vec::new();
        let mut prompts = Vec::new();
        let mut own_ids = 0;
        for Arrival { at_ms, prompt, answer, own, prompt_ms, answer_ms, turn } in arrivals {
            let mut before = None;
            let mut number = |id: Result<u64, u64>| {
                let next = numbers.len() as u32;
                let number = *numbers.entry((before, id)).or_insert(next);
                before = Some(number);
                number
            };
            let blocks: Vec<u32> = prompt.iter().map(|&id| number(Ok(id))).collect();
            let mut answer: Vec<u32> = answer.iter().map(|&id| number(Ok(id))).collect();
            answer.extend((own_ids..own_ids + own as u64).map(|id| number(Err(id))));
            own_ids += own as u64;
            in_prompts.resize(numbers.len(), false);
            blocks.iter().for_each(|&block| in_prompts[block as usize] = true);
            prompts.push(Prompt { at_ms, blocks, answer, prompt_ms, answer_ms, turn });
        }
        let total = prompts.iter().map(|prompt| prompt.blocks.len()).sum();
        let distinct = in_prompts.iter().filter(|&&is_in_prompt| is_in_prompt).count();
        Self { prompts, distinct, total, numbers: numbers.len() }
    }

    /// Returns the number of requests.
    pub fn requests(&self) -> usize {
        self.prompts.len()
    }

    /// Returns the number of distinct blocks of prompts.
    pub fn distinct(&self) -> usize {
        self.distinct
    }

    /// Returns the number of blocks of all prompts.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of sessions that are not nested in others.
    pub fn sessions(&self) -> usize {
        self.turns().starts(0).len()
    }

    /// Returns the order of the requests in sessions.
    pub(super) fn turns(&self) -> Turns {
        Turns::new(self.prompts.iter().map(|prompt| prompt.turn))
    }

    /// Returns the number of distinct blocks, those of answers included.
    pub(super) fn numbers(&self) -> usize {
        self.numbers
    }

    /// Returns a share of the distinct blocks, at least one.
    pub fn capacity(&self, share: f64) -> usize {
        ((self.distinct as f64 * share).round() as usize).max(1)
    }
}
