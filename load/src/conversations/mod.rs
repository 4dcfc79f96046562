//! The built-in workload: conversations generated from a seed, so that a replay needs no trace.
//!
//! Conversations begin as a Poisson process. Each has one of a few shared system prompts, sometimes
//! a document, and some turns. The prompt of a turn is all text before it and a new message; the
//! next turn arrives after the time to write, read and think about the answer. The ids of a request
//! also cover its answer. Lengths and think times are lognormal, like measured ones.
//!
//! Equal seeds give equal requests on every machine: the generator is fixed (PCG), not a library's
//! default.

#[cfg(test)]
mod tests;
mod turns;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use kvpool::SessionId;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp, Geometric, Zipf};
use rand_pcg::Pcg64Mcg;

use crate::draw::{HashIds, Prompt, Spread};
use crate::request::{ANSWER_TOKEN, Request, Turn};

pub use turns::turn;

const CONVERSATIONS_PER_S: f64 = 0.7;
const MORE_TURNS_MEAN: f64 = 4.0;
/// Number of shared system prompts, and the exponent of their popularity.
const SYSTEM_PROMPTS: usize = 12;
const SYSTEM_PROMPT_SKEW: f64 = 1.1;
const DOCUMENT_SHARE: f64 = 0.25;
/// Maximum length of a prompt in tokens; a conversation that reaches it ends.
const CONTEXT_TOKENS_MAX: u32 = 128 * 1024;

const SYSTEM_TOKENS: Spread = Spread { median: 1200.0, sigma: 0.7, max: 8192.0 };
const DOCUMENT_TOKENS: Spread = Spread { median: 9000.0, sigma: 1.0, max: 100_000.0 };
const MESSAGE_TOKENS: Spread = Spread { median: 180.0, sigma: 1.3, max: 16_384.0 };
const ANSWER_TOKENS: Spread = Spread { median: 260.0, sigma: 0.8, max: 4096.0 };
const THINK_SECONDS: Spread = Spread { median: 25.0, sigma: 1.0, max: 1800.0 };

/// An endless iterator over the requests of conversations, in order of arrival.
pub struct Conversations {
    rng: Pcg64Mcg,
    system_prompts: Vec<Prompt>,
    popularity: Zipf<f64>,
    /// The next turn of every open conversation; the earliest on top.
    due: BinaryHeap<Reverse<Due>>,
    next_start_s: f64,
    next_conversation: u64,
    ids: HashIds,
}

/// A conversation's next turn, ordered by time, then by conversation, so that equal seeds give
/// equal orders.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Duration,
    conversation: u64,
    turns_left: u64,
    think: Duration,
    prompt: Prompt,
}

impl Conversations {
    /// Creates the conversations of a seed.
    pub fn new(seed: u64) -> Self {
        let mut this = Self {
            rng: Pcg64Mcg::seed_from_u64(seed),
            system_prompts: Vec::new(),
            popularity: Zipf::new(SYSTEM_PROMPTS as f64, SYSTEM_PROMPT_SKEW)
                .expect("a positive count and skew"),
            due: BinaryHeap::new(),
            next_start_s: 0.0,
            next_conversation: 0,
            ids: HashIds::default(),
        };
        for _ in 0..SYSTEM_PROMPTS {
            let tokens = SYSTEM_TOKENS.draw_tokens(&mut this.rng);
            this.system_prompts.push(Prompt::shared(tokens, &mut this.ids));
        }
        this
    }

    /// Returns the first `requests` requests of a seed; the first arrives at zero.
    pub fn first(seed: u64, requests: usize) -> Vec<Request> {
        let mut requests: Vec<Request> = Self::new(seed).take(requests).collect();
        let zero = requests.first().map_or(Duration::ZERO, |request| request.arrival);
        for request in &mut requests {
            request.arrival -= zero;
        }
        requests
    }

    /// Begins every conversation that starts before the next turn of an open one.
    fn begin_due(&mut self) {
        let gap = Exp::new(CONVERSATIONS_PER_S).expect("a positive rate");
        let more_turns = Geometric::new(1.0 / (1.0 + MORE_TURNS_MEAN)).expect("a probability");
        while self.due.peek().is_none_or(|Reverse(due)| due.at.as_secs_f64() >= self.next_start_s) {
            let at = Duration::from_secs_f64(self.next_start_s);
            self.next_start_s += gap.sample(&mut self.rng);
            let system = self.popularity.sample(&mut self.rng) as usize - 1;
            let mut prompt = self.system_prompts[system].clone();
            if self.rng.random_bool(DOCUMENT_SHARE) {
                let tokens = DOCUMENT_TOKENS.draw_tokens(&mut self.rng);
                prompt.extend(tokens, &mut self.ids);
            }
            let message = MESSAGE_TOKENS.draw_tokens(&mut self.rng);
            prompt.extend(message, &mut self.ids);
            let turns_left = more_turns.sample(&mut self.rng);
            let (conversation, think) = (self.next_conversation, Duration::ZERO);
            self.due.push(Reverse(Due { at, conversation, turns_left, think, prompt }));
            self.next_conversation += 1;
        }
    }
}

impl Iterator for Conversations {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.begin_due();
        let Reverse(turn) = self.due.pop()?;
        let Due { at, conversation, turns_left, think, mut prompt } = turn;
        let output_tokens = ANSWER_TOKENS.draw_tokens(&mut self.rng);
        let input_tokens = prompt.tokens;
        prompt.extend(output_tokens, &mut self.ids);
        let request = Request {
            arrival: at,
            input_tokens,
            output_tokens,
            hash_ids: prompt.hash_ids.clone(),
            hashed_tokens: prompt.tokens,
            turn: Some(Turn { session: SessionId(conversation), parent: None, think }),
        };
        let message = MESSAGE_TOKENS.draw_tokens(&mut self.rng);
        prompt.extend(message, &mut self.ids);
        if turns_left > 0 && prompt.tokens <= CONTEXT_TOKENS_MAX {
            let think_s = THINK_SECONDS.draw(&mut self.rng);
            let wait_s = f64::from(output_tokens) * ANSWER_TOKEN.as_secs_f64() + think_s;
            let (at, think) = (at + Duration::from_secs_f64(wait_s), Duration::from_secs_f64(think_s));
            self.due.push(Reverse(Due { at, conversation, turns_left: turns_left - 1, think, prompt }));
        }
        Some(request)
    }
}
