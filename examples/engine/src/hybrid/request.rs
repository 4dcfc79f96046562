//! Requests, and the answers that are expected.

use kvpool::SessionId;

use crate::request::{Sampling, sample};

/// A request for answers to a prompt.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Number of tokens of each answer.
    pub tokens: usize,
    /// Number of answers, which are forked behind the prompt.
    pub answers: u32,
    /// The conversation that it belongs to.
    pub session: SessionId,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Number of tokens that may be drafted per step.
    pub drafts: usize,
}

impl Request {
    /// Returns the number of tokens at which an answer ends.
    pub fn tokens_max(&self) -> usize {
        self.prompt.len() + self.tokens
    }

    /// Chooses the token at a position.
    pub fn choose(&self, logits: &[f32], answer: u32, position: usize) -> u32 {
        sample(logits, self.sampling, answer, position)
    }
}

/// A request, and what the reference computed for its answers.
pub struct Planned {
    /// The request.
    pub request: Request,
    /// The answers.
    pub expected: Vec<Expected>,
}

/// What the reference computed for an answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Expected {
    /// The prompt and the answer.
    pub tokens: Vec<u32>,
    /// The logits of all tokens but the last, `[tokens][vocab]`.
    pub logits: Vec<f32>,
}
