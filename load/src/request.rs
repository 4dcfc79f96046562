use std::time::Duration;

use kvpool::SessionId;

/// Prompt tokens per hash id, unless the trace says otherwise.
pub const HASH_BLOCK_TOKENS: u32 = 512;

/// Time per token of an answer, before the next turn of its conversation.
pub const ANSWER_TOKEN: Duration = Duration::from_millis(30);

/// A request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Its arrival, relative to the first request.
    pub arrival: Duration,
    /// Tokens of the prompt, at least one.
    pub input_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// One id per piece of the text, where equal ids mean equal prefixes; may be empty.
    pub hash_ids: Vec<u64>,
    /// Tokens covered by these ids: the prompt's, or none; in generated conversations also the
    /// answer's.
    pub hashed_tokens: u32,
    /// Its place in its session, if it belongs to one.
    pub turn: Option<Turn>,
}

/// The place of a request in its session. The turns of a session follow one another in the order of
/// their arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The session: a conversation of a user or an agent.
    pub session: SessionId,
    /// The session in which this one is nested, if it is a subagent's. It begins after the parent's
    /// last turn before it, and the parent's next turn waits for its end.
    pub parent: Option<SessionId>,
    /// The time from the end of the previous answer to the arrival; in the first turn of a
    /// subagent, from the end of the parent's previous answer.
    pub think: Duration,
}

impl Request {
    /// Creates a request without hash ids.
    pub const fn new(arrival: Duration, input_tokens: u32, output_tokens: u32) -> Self {
        Self { arrival, input_tokens, output_tokens, hash_ids: Vec::new(), hashed_tokens: 0, turn: None }
    }

    /// Returns the number of tokens at its end.
    pub const fn tokens(&self) -> u64 {
        self.input_tokens as u64 + self.output_tokens as u64
    }
}
