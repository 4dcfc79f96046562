//! Conversion of a trace for the simulation of eviction policies.

use kvpool_policies::simulate::{Arrival, Prompts, Turn};

use kvpool_load::Request;

use crate::replay::Costs;
use crate::trace::Trace;

/// How long requests run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pace {
    /// Milliseconds per token of an answer.
    pub token_ms: u64,
    /// Tokens of prompts computed per second, at least one; by default as in a replay.
    pub prefill_rate: Option<u64>,
}

/// Returns the requests of a trace in blocks of its hash ids.
pub fn prompts(trace: &Trace, pace: Pace) -> Prompts {
    Prompts::of_arrivals(trace.requests.iter().map(|request| arrival(request, trace.hash_tokens, pace)))
}

fn arrival(request: &Request, hash_tokens: u32, pace: Pace) -> Arrival<'_> {
    let full = |tokens: u32| (tokens / hash_tokens) as usize;
    let ids = request.hash_ids.len();
    let (prompt, answer, own) = if request.hashed_tokens > request.input_tokens {
        // The ids continue through the answer. The block in which the prompt ends does not belong
        // to it: no earlier request has its rest.
        let prompt = full(request.input_tokens);
        (prompt, full(request.hashed_tokens).max(prompt), 0)
    } else {
        let blocks = request.tokens().div_ceil(hash_tokens.into()) as usize;
        (ids, ids, blocks.saturating_sub(ids))
    };
    Arrival {
        at_ms: request.arrival.as_millis() as u64,
        prompt: &request.hash_ids[..prompt],
        answer: &request.hash_ids[prompt..answer],
        own,
        prompt_ms: match pace.prefill_rate {
            None => Costs::USUAL.of_step(request.input_tokens.into(), 0) / 1_000_000,
            Some(rate) => u64::from(request.input_tokens) * 1000 / rate,
        },
        answer_ms: u64::from(request.output_tokens) * pace.token_ms,
        turn: request.turn.map(|turn| Turn {
            session: turn.session,
            parent: turn.parent,
            think_ms: turn.think.as_millis() as u64,
        }),
    }
}
