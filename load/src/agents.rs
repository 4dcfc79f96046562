//! Sessions of coding agents, generated from a seed.
//!
//! Sessions begin as a Poisson process. Each begins with the system prompt and the tools of one of
//! a few agents, and the files and messages of its task. Each turn adds the answer and the result
//! of a tool, or the next message of the user. When the context is full, the agent begins anew with
//! its tools and a summary. Now and then an answer starts subagents: short sessions with tools of
//! their own, all at a time, for which the next turn waits.
//!
//! The shape is that of published sessions of coding agents (callanjfox/kv-cache-tester): prompts
//! of 104,000 tokens in the median, that begin with 25,000 and grow by hundreds a turn; answers of
//! 212; 33 turns; half of the think times below 10 s, a tenth above 3 minutes, a hundredth above
//! half an hour. All lengths are an [`EIGHTH`] of these, so that many sessions fit into a test; the
//! times are not.
//!
//! Equal seeds give equal requests, as in [`Conversations`](crate::Conversations).

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use kvpool::SessionId;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64Mcg;

use crate::draw::{HashIds, Prompt, Spread};
use crate::request::{ANSWER_TOKEN, Request, Turn};

const EIGHTH: f64 = 0.125;

const SESSIONS_PER_S: f64 = 0.05;
/// Number of agents, and of kinds of subagents, each with tools of its own.
const AGENTS: usize = 4;
const SUBAGENTS: usize = 3;
/// Maximum length of a context in tokens, after which it is summarized.
const CONTEXT_TOKENS_MAX: u32 = (500_000.0 * EIGHTH) as u32;

const TOOLS_TOKENS: Spread = eighth(16_000.0, 0.3, 40_000.0);
const SUBAGENT_TOOLS_TOKENS: Spread = eighth(7_000.0, 0.3, 20_000.0);
const TASK_TOKENS: Spread = eighth(6_000.0, 1.0, 100_000.0);
/// Some sessions resume an earlier one, whose whole context comes back.
const RESUMED_SHARE: f64 = 0.4;
const RESUMED_TOKENS: Spread = eighth(120_000.0, 0.6, 400_000.0);
const SUBTASK_TOKENS: Spread = eighth(1_500.0, 0.8, 20_000.0);
const SUMMARY_TOKENS: Spread = eighth(8_000.0, 0.5, 30_000.0);
const RESULT_TOKENS: Spread = eighth(600.0, 1.5, 100_000.0);
const ANSWER_TOKENS: Spread = eighth(212.0, 0.85, 12_000.0);
const TURNS: Spread = Spread { median: 33.0, sigma: 1.1, max: 300.0 };
const SUBAGENT_TURNS: Spread = Spread { median: 5.0, sigma: 0.8, max: 40.0 };

/// Most answers call a tool; others wait for a user, who may be away.
const USER_SHARE: f64 = 0.3;
const TOOL_SECONDS: Spread = Spread { median: 7.0, sigma: 0.7, max: 600.0 };
const USER_SECONDS: Spread = Spread { median: 90.0, sigma: 1.8, max: 48_000.0 };

/// The share of answers that start subagents, and the most that one starts.
const SUBAGENTS_SHARE: f64 = 0.03;
const SUBAGENTS_MAX: u32 = 4;

const fn eighth(median: f64, sigma: f64, max: f64) -> Spread {
    Spread { median: median * EIGHTH, sigma, max: max * EIGHTH }
}

/// An endless iterator over the requests of sessions of agents, in order of arrival.
pub struct Agents {
    rng: Pcg64Mcg,
    ids: HashIds,
    /// The prompts of agents, and of subagents.
    tools: Vec<Prompt>,
    subagent_tools: Vec<Prompt>,
    /// The requests of sessions that have begun; the earliest on top.
    due: BinaryHeap<Reverse<Due>>,
    next_start_s: f64,
    next_session: u64,
}

/// A request, ordered by time, then by session, so that equal seeds give equal orders.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Duration,
    session: u64,
    parent: Option<u64>,
    think: Duration,
    input_tokens: u32,
    output_tokens: u32,
    /// With the answer.
    text: Prompt,
}

impl Agents {
    /// Creates the sessions of a seed.
    pub fn new(seed: u64) -> Self {
        let (mut rng, mut ids) = (Pcg64Mcg::seed_from_u64(seed), HashIds::default());
        let mut tools = |count, tokens: Spread| {
            (0..count).map(|_| Prompt::shared(tokens.draw_tokens(&mut rng), &mut ids)).collect()
        };
        let (tools, subagent_tools) = (tools(AGENTS, TOOLS_TOKENS), tools(SUBAGENTS, SUBAGENT_TOOLS_TOKENS));
        let due = BinaryHeap::new();
        Self { rng, ids, tools, subagent_tools, due, next_start_s: 0.0, next_session: 0 }
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

    fn number(&mut self) -> u64 {
        self.next_session += 1;
        self.next_session - 1
    }

    /// Generates every session that starts before the earliest request of those that have begun.
    fn begin_due(&mut self) {
        let gap = Exp::new(SESSIONS_PER_S).expect("a positive rate");
        while self.due.peek().is_none_or(|Reverse(due)| due.at.as_secs_f64() >= self.next_start_s) {
            let start = Duration::from_secs_f64(self.next_start_s);
            self.next_start_s += gap.sample(&mut self.rng);
            let (session, agent) = (self.number(), self.rng.random_range(0..AGENTS));
            self.begin(session, agent, start);
        }
    }

    /// Generates a session and its subagents.
    fn begin(&mut self, session: u64, agent: usize, start: Duration) {
        let mut text = self.tools[agent].clone();
        let task = if self.rng.random_bool(RESUMED_SHARE) { RESUMED_TOKENS } else { TASK_TOKENS };
        text.extend(task.draw_tokens(&mut self.rng), &mut self.ids);
        let (mut at, mut think) = (start, Duration::ZERO);
        for _ in 0..TURNS.draw_tokens(&mut self.rng) {
            let end = self.answer(&mut text, (session, None), at, think);
            let is_user = self.rng.random_bool(USER_SHARE);
            let seconds = if is_user { USER_SECONDS } else { TOOL_SECONDS };
            think = Duration::from_secs_f64(seconds.draw(&mut self.rng));
            at = end + think;
            if self.rng.random_bool(SUBAGENTS_SHARE) {
                for _ in 0..self.rng.random_range(1..=SUBAGENTS_MAX) {
                    at = at.max(self.delegate(session, end));
                }
            }
            text.extend(RESULT_TOKENS.draw_tokens(&mut self.rng), &mut self.ids);
            if text.tokens > CONTEXT_TOKENS_MAX {
                text = self.tools[agent].clone();
                text.extend(SUMMARY_TOKENS.draw_tokens(&mut self.rng), &mut self.ids);
            }
        }
    }

    /// Generates a subagent that begins after an answer of its parent. Returns its end.
    fn delegate(&mut self, parent: u64, after: Duration) -> Duration {
        let session = self.number();
        let mut text = self.subagent_tools[self.rng.random_range(0..SUBAGENTS)].clone();
        text.extend(SUBTASK_TOKENS.draw_tokens(&mut self.rng), &mut self.ids);
        let mut end = after;
        for turn in 0..SUBAGENT_TURNS.draw_tokens(&mut self.rng) {
            // It begins at once.
            let seconds = if turn == 0 { 0.0 } else { TOOL_SECONDS.draw(&mut self.rng) };
            let think = Duration::from_secs_f64(seconds);
            end = self.answer(&mut text, (session, Some(parent)), end + think, think);
            text.extend(RESULT_TOKENS.draw_tokens(&mut self.rng), &mut self.ids);
            if text.tokens > CONTEXT_TOKENS_MAX {
                break;
            }
        }
        end
    }

    /// Adds a turn and its answer to a text. Returns the end of the answer.
    fn answer(
        &mut self,
        text: &mut Prompt,
        (session, parent): (u64, Option<u64>),
        at: Duration,
        think: Duration,
    ) -> Duration {
        let (input_tokens, output_tokens) = (text.tokens, ANSWER_TOKENS.draw_tokens(&mut self.rng));
        text.extend(output_tokens, &mut self.ids);
        let text = text.clone();
        self.due.push(Reverse(Due { at, session, parent, think, input_tokens, output_tokens, text }));
        at + ANSWER_TOKEN * output_tokens
    }
}

impl Iterator for Agents {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.begin_due();
        let Reverse(Due { at, session, parent, think, input_tokens, output_tokens, text }) =
            self.due.pop()?;
        let turn = Turn { session: SessionId(session), parent: parent.map(SessionId), think };
        Some(Request {
            arrival: at,
            input_tokens,
            output_tokens,
            hash_ids: text.hash_ids,
            hashed_tokens: text.tokens,
            turn: Some(turn),
        })
    }
}
