//! Sessions of agents, as recorded by kv-cache-tester: one JSON document per session.

use std::io::Read;

use kvpool::SessionId;
use kvpool_load::{ANSWER_TOKEN, Turn};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::Reason;
use super::hashes::Hashing;
use super::{ReadOptions, Row, TimeUnit, later, think};

const SESSION_BYTES_MAX: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };

#[derive(Deserialize)]
struct Session<'s> {
    block_size: std::num::NonZeroU32,
    #[serde(default)]
    hash_id_scope: Scope,
    #[serde(borrow)]
    requests: Vec<Step<'s>>,
}

/// Where equal ids mean equal prefixes.
#[derive(PartialEq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scope {
    #[default]
    Local,
    Global,
}

/// A request, or the requests of a subagent. Recorded times include those of the next two fields.
#[derive(Deserialize)]
struct Step<'s> {
    /// Seconds from the start of the session or of the subagent.
    t: f64,
    /// Seconds from the end of the previous answer: of a user, or of tools.
    think_time: Option<f64>,
    /// Seconds from the request to the end of its answer.
    api_time: Option<f64>,
    #[serde(rename = "in")]
    input: Option<i64>,
    #[serde(rename = "out")]
    output: Option<i64>,
    #[serde(borrow, default)]
    hash_ids: Option<&'s RawValue>,
    requests: Option<Vec<Step<'s>>>,
}

/// Reads the rows of one session, and the tokens per hash id. Sets `line` to the line of an error
/// in the JSON.
pub(super) fn read(
    input: impl Read,
    options: &ReadOptions,
    line: &mut Option<u64>,
) -> Result<(Vec<Row>, u32), Reason> {
    let mut bytes = Vec::new();
    input.take(SESSION_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Reason::Read)?;
    if bytes.len() as u64 > SESSION_BYTES_MAX {
        return Err(Reason::TooLarge(SESSION_BYTES_MAX));
    }
    let text = std::str::from_utf8(&bytes).map_err(|e| {
        let before = &bytes[..e.valid_up_to()];
        *line = Some(1 + before.iter().filter(|&&byte| byte == b'\n').count() as u64);
        Reason::NotUtf8(before.rsplit(|&byte| byte == b'\n').next().map_or(0, <[u8]>::len))
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let session: Session<'_> = serde_json::from_str(text).map_err(|e| {
        *line = Some(e.line() as u64);
        Reason::json(&e)
    })?;
    let hash_tokens = options.hash_tokens.unwrap_or(session.block_size.get());
    let chain = (session.hash_id_scope == Scope::Local).then_some(options.session);
    let hashing = Hashing { tokens: hash_tokens, chain };
    let mut reader = Reader { options, hashing, rows: Vec::new(), sessions: 0 };
    reader.add(session.requests, None, 0, 0)?;
    let mut rows = reader.rows;
    rows.sort_by_key(|&(at_ns, _)| at_ns);
    Ok((rows, hash_tokens))
}

struct Reader<'o> {
    options: &'o ReadOptions,
    hashing: Hashing,
    rows: Vec<Row>,
    /// Sessions begun, whose numbers are their ids.
    sessions: u64,
}

impl Reader<'_> {
    /// Adds the rows of steps that begin at `start_ns`: those of a session, which are a session of
    /// their own in this parent, whose last answer ended at `end_ns`. The parser bounds the depth.
    fn add(
        &mut self,
        steps: Vec<Step<'_>>,
        parent: Option<SessionId>,
        start_ns: i64,
        mut end_ns: i64,
    ) -> Result<(), Reason> {
        let session = SessionId(self.sessions);
        self.sessions += 1;
        let mut is_first = true;
        for (number, step) in steps.into_iter().enumerate() {
            let one = || -> Result<(), Reason> {
                let unit = self.options.time_unit.unwrap_or(TimeUnit::S);
                let at_ns = later(start_ns, unit.ns("t", step.t)?)?;
                if let Some(steps) = step.requests {
                    return self.add(steps, Some(session), at_ns, end_ns);
                }
                let input = step.input.ok_or(Reason::Missing("in"))?;
                let output = step.output.ok_or(Reason::Missing("out"))?;
                let think_ns = step.think_time.map(|time| unit.think_ns("think_time", time)).transpose()?;
                let answer_ns = step.api_time.map(|time| unit.think_ns("api_time", time)).transpose()?;
                let lengths = [("in", input), ("out", output)];
                let mut request = self.hashing.request(lengths, step.hash_ids, self.options)?;
                // The first turn of a subagent has no think time of its own.
                let think = think(think_ns.filter(|_| !is_first), at_ns, end_ns);
                request.turn = Some(Turn { session, parent, think });
                end_ns = at_ns.saturating_add(answer_ns.unwrap_or(output * ANSWER_TOKEN.as_nanos() as i64));
                is_first = false;
                self.rows.push((at_ns, request));
                Ok(())
            };
            one().map_err(|reason| reason.within(&format!("requests[{number}]")))?;
        }
        Ok(())
    }
}
