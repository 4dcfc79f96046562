//! Sessions in a closed loop.

use std::time::Duration;

use clap::Args;

use super::model::ModelArgs;
use super::prefix::PrefixArgs;
use super::{ReplayArgs, whole};
use crate::replay::{Costs, SessionOptions};

/// Number of sessions at a time, of agents that follow conversations.
const AT_ONCE: u64 = 16;

/// The sessions of a replay, and the cost model by which their answers end.
#[derive(Clone, Copy, PartialEq, Debug, Default, Args)]
pub struct SessionArgs {
    /// Replay the sessions of the trace in a closed loop, N at a time: the next request of a
    /// session arrives after the end of its last answer and its think time, and when a session
    /// ends, the next one begins. Prefixes are reused, unless --prefix-cache off is given
    ///
    /// Traces of agents (kv-cache-tester) and Dynamo's have sessions, and so have generated
    /// requests. A subagent is a part of its session, which waits for it.
    #[arg(long, value_name = "N", value_parser = whole(1..=1_000_000), allow_negative_numbers = true)]
    pub sessions: Option<u64>,
    /// Prompt tokens a second that a thread computes, of those that are not cached [default:
    /// 100000]
    #[arg(long, value_name = "TOKENS", requires = "sessions", value_parser = whole(1..=1_000_000_000), allow_negative_numbers = true)]
    pub prefill_rate: Option<u64>,
    /// Milliseconds for a token of an answer, beside the prompts of the same step [default: 10, and
    /// 0.1 for each sequence of the step]
    #[arg(long, value_name = "MS", requires = "sessions", value_parser = milliseconds, allow_negative_numbers = true)]
    pub answer_token_ms: Option<f64>,
    /// Tell the eviction policy when each session will return, as an engine that knows its tools
    /// could
    #[arg(long, requires = "sessions")]
    pub tell_returns: bool,
}

impl SessionArgs {
    /// Returns the options of the replay, if it is one of sessions.
    pub(crate) fn options(self) -> Option<SessionOptions> {
        let usual = Costs::USUAL;
        let costs = self.prefill_rate.map_or(usual, |rate| usual.prefill_rate(rate));
        let answer = self.answer_token_ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
        let costs = answer.map_or(costs, |time| costs.answer_token(time));
        let at_once = self.sessions? as usize;
        Some(SessionOptions { at_once, costs, tells_returns: self.tell_returns })
    }
}

impl ReplayArgs {
    /// Returns the arguments of generated agents, which follow generated conversations unless flags
    /// choose the requests or the pool.
    pub(crate) fn agents(&self) -> Option<Self> {
        let Self { workload, model, sessions, .. } = self;
        let is_built_in = workload.trace.is_empty()
            && (workload.load, workload.requests, workload.blocks) == (None, None, None)
            && (workload.prefix, model) == (PrefixArgs::default(), &ModelArgs::default())
            && *sessions == SessionArgs::default()
            && self.comparison.compare.is_none()
            && self.resize_at.is_none();
        let sessions = SessionArgs { sessions: Some(AT_ONCE), ..SessionArgs::default() };
        is_built_in.then(|| Self { sessions, ..self.clone() })
    }
}

/// `--answer-token-ms`.
fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        // NaN is in no range.
        Ok(value) if (0.001..=60_000.0).contains(&value) => Ok(value),
        Ok(value) => Err(format!("{value} is not from 0.001 to 60,000")),
        Err(_) => Err("not a number of milliseconds".to_owned()),
    }
}
