//! Conversion of a trace for the simulation of eviction policies.

use kvpool_policies::simulate::{Arrival, Prompts};

use kvpool_load::Request;

use crate::replay::step_ns;
use crate::trace::Trace;

/// Returns the requests of a trace in blocks of its hash ids, with `token_ms` milliseconds per
/// token of an answer.
pub fn prompts(trace: &Trace, token_ms: u64) -> Prompts {
    Prompts::of_arrivals(trace.requests.iter().map(|request| arrival(request, trace.hash_tokens, token_ms)))
}

fn arrival(request: &Request, hash_tokens: u32, token_ms: u64) -> Arrival<'_> {
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
        prompt_ms: step_ns(request.input_tokens.into(), 0) / 1_000_000,
        answer_ms: u64::from(request.output_tokens) * token_ms,
    }
}
