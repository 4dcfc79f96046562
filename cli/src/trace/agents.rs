//! Sessions of agents, as recorded by kv-cache-tester: one JSON document per session.

use std::io::Read;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::Reason;
use super::hashes::Hashing;
use super::{ReadOptions, Row, TimeUnit, later};

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

/// A request, or the requests of a subagent. Recorded times include think times.
#[derive(Deserialize)]
struct Step<'s> {
    /// Seconds from the start of the session or of the subagent.
    t: f64,
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
    let mut rows = Vec::new();
    add(session.requests, 0, &mut rows, options, Hashing { tokens: hash_tokens, chain })?;
    rows.sort_by_key(|&(at_ns, _)| at_ns);
    Ok((rows, hash_tokens))
}

/// Adds the rows of steps that begin at this time. The parser bounds the depth.
fn add(
    steps: Vec<Step<'_>>,
    start_ns: i64,
    rows: &mut Vec<Row>,
    options: &ReadOptions,
    hashing: Hashing,
) -> Result<(), Reason> {
    for (number, step) in steps.into_iter().enumerate() {
        let one = || -> Result<(), Reason> {
            let at_ns = options.time_unit.unwrap_or(TimeUnit::S).ns("t", step.t)?;
            let at_ns = later(start_ns, at_ns)?;
            if let Some(steps) = step.requests {
                return add(steps, at_ns, rows, options, hashing);
            }
            let input = step.input.ok_or(Reason::Missing("in"))?;
            let output = step.output.ok_or(Reason::Missing("out"))?;
            rows.push((at_ns, hashing.request([("in", input), ("out", output)], step.hash_ids, options)?));
            Ok(())
        };
        one().map_err(|reason| reason.within(&format!("requests[{number}]")))?;
    }
    Ok(())
}
