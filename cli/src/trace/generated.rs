//! Generated requests, for replays without a trace.

use clap::ValueEnum;
use kvpool_load::{Agents, Conversations, HASH_BLOCK_TOKENS};

use super::Trace;

/// A kind of generated requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Generated {
    /// Conversations of users: 6,700 tokens a request
    Conversations,
    /// Sessions of coding agents with subagents, at an eighth of their lengths
    Agents,
}

impl Generated {
    /// Returns the number of requests of a replay, unless set.
    pub const fn requests(self) -> usize {
        match self {
            Self::Conversations => 30_000,
            Self::Agents => 10_000,
        }
    }

    /// Returns the first `requests` requests of a seed.
    pub fn trace(self, seed: u64, requests: usize) -> Trace {
        let (name, requests) = match self {
            Self::Conversations => ("conversations", Conversations::first(seed, requests)),
            Self::Agents => ("agents", Agents::first(seed, requests)),
        };
        let name = format!("{name} (seed {seed})");
        Trace { name, requests, hash_tokens: HASH_BLOCK_TOKENS, out_of_order: 0 }
    }
}
