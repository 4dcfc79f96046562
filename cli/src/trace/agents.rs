//! Sessions of agents, as kv-cache-tester records them: one JSON document a session.

use std::io::Read;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::Reason;
use super::hashes::{checked, combined};
use super::{HashIds, ReadOptions, Request, Row, Rows, TimeUnit, tokens};

/// The largest document, in bytes.
const SESSION_BYTES_MAX: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };

#[derive(Deserialize)]
#[serde(bound = "H: Deserialize<'de> + Default")]
struct Session<H> {
    /// Tokens for one hash id.
    block_size: u32,
    #[serde(default)]
    hash_id_scope: Scope,
    requests: Vec<Step<H>>,
}

/// Where equal ids mean equal prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scope {
    #[default]
    Local,
    Global,
}

/// A request, or the requests of a subagent. Think times are part of the recorded times.
#[derive(Deserialize)]
#[serde(bound = "H: Deserialize<'de> + Default")]
struct Step<H> {
    /// Seconds from the start of the session or of the subagent.
    t: f64,
    #[serde(rename = "in")]
    input: Option<i64>,
    #[serde(rename = "out")]
    output: Option<i64>,
    #[serde(default)]
    hash_ids: H,
    requests: Option<Vec<Step<H>>>,
}

/// Reads the rows of one session, whose number tells its hash ids from those of others.
pub(super) fn read(input: impl Read, options: &ReadOptions, number: u64) -> Result<Rows, Reason> {
    match options.hash_ids {
        HashIds::Ignored => rows(input, options, |_: IgnoredAny, _, _, _| Ok((Vec::new(), 0))),
        HashIds::Required => rows(input, options, |ids, tokens, size, scope| {
            let (mut ids, hashed_tokens) = checked(ids, tokens, size, true)?;
            if scope == Scope::Local {
                ids.iter_mut().for_each(|id| *id = combined(number, *id));
            }
            Ok((ids, hashed_tokens))
        }),
    }
}

fn rows<H: DeserializeOwned + Default>(
    input: impl Read,
    options: &ReadOptions,
    ids: impl Fn(H, u32, u32, Scope) -> Result<(Vec<u64>, u32), Reason>,
) -> Result<Rows, Reason> {
    let mut input = input.take(SESSION_BYTES_MAX + 1);
    let session = serde_json::from_reader(&mut input);
    if input.limit() == 0 {
        return Err(Reason::TooLarge(SESSION_BYTES_MAX));
    }
    let Session { block_size, hash_id_scope, requests }: Session<H> = session.map_err(Reason::json)?;
    if block_size == 0 {
        return Err(Reason::OutOfRange { field: "block_size".to_owned(), value: 0, min: 1, max: u32::MAX });
    }
    let (hash_tokens, unit) =
        (options.hash_tokens.unwrap_or(block_size), options.time_unit.unwrap_or(TimeUnit::S));
    let mut rows = Vec::new();
    let one = |step: Step<H>, at_ns| -> Result<Row, Reason> {
        let input_tokens = tokens("in", step.input.ok_or(Reason::Missing("in"))?, 1)?;
        let output_tokens = tokens("out", step.output.ok_or(Reason::Missing("out"))?, 0)?;
        let mut request = Request::new(Duration::ZERO, input_tokens, output_tokens);
        (request.hash_ids, request.hashed_tokens) =
            ids(step.hash_ids, input_tokens, hash_tokens, hash_id_scope)?;
        Ok((at_ns, request))
    };
    // The steps of subagents are put in the place of their subagent.
    let mut steps: Vec<(String, i64, Step<H>)> = Vec::new();
    let named = |of: &str, start_ns, steps: Vec<Step<H>>| {
        let name = |(number, step)| (format!("{of}requests[{number}]"), start_ns, step);
        steps.into_iter().enumerate().rev().map(name).collect::<Vec<_>>()
    };
    steps.extend(named("", 0, requests));
    while let Some((place, start_ns, mut step)) = steps.pop() {
        let within = |reason| Reason::Within { place: place.clone(), reason: Box::new(reason) };
        let at_ns: i64 = unit.ns("t", step.t).map_err(within)?.saturating_add(start_ns);
        match step.requests.take() {
            Some(requests) => steps.extend(named(&format!("{place}."), at_ns, requests)),
            None => rows.push(one(step, at_ns).map_err(within)?),
        }
    }
    rows.sort_by_key(|&(at_ns, _)| at_ns);
    Ok(Rows { rows, hash_tokens })
}
