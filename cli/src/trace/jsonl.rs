//! Mooncake's, Bailian's and Dynamo's traces: one JSON object per line.

use std::collections::HashMap;
use std::io::BufRead;

use kvpool::SessionId;
use kvpool_load::Turn;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::error::Reason;
use super::hashes::Hashing;
use super::lines::Lines;
use super::{ANSWER_TOKEN, Format, HASH_BLOCK_TOKENS, ReadOptions, Request, Row, TimeUnit, later, think};

const BAILIAN_HASH_TOKENS: u32 = 16;

/// A line. Lengths are signed, so that errors can quote negative ones.
#[derive(Deserialize)]
struct Line<'l> {
    #[serde(alias = "created_time")]
    timestamp: Option<f64>,
    delay: Option<f64>,
    /// The same in milliseconds, regardless of the trace's unit.
    delay_ms: Option<f64>,
    session_id: Option<String>,
    chat_id: Option<IgnoredAny>,
    #[serde(alias = "input_tokens")]
    input_length: i64,
    #[serde(alias = "output_tokens")]
    output_length: i64,
    #[serde(borrow, default)]
    hash_ids: Option<&'l RawValue>,
}

impl Line<'_> {
    /// Returns the format that has these fields, and its name.
    fn format(&self) -> (Format, &'static str) {
        match (&self.chat_id, &self.session_id) {
            (Some(_), _) => (Format::Bailian, "bailian"),
            (None, Some(_)) => (Format::Dynamo, "dynamo"),
            (None, None) => (Format::Mooncake, "mooncake"),
        }
    }
}

/// Reads up to `max` rows, and the tokens per hash id. Without a format, the fields of the first
/// line decide, and lines of another format are refused, because their times and ids have other
/// meanings.
pub(super) fn read<R: BufRead>(
    lines: &mut Lines<R>,
    mut format: Format,
    options: &ReadOptions,
    max: usize,
) -> Result<(Vec<Row>, u32), Reason> {
    let (mut rows, mut ends, mut hash_tokens) = (Vec::new(), HashMap::new(), HASH_BLOCK_TOKENS);
    let mut detected = None;
    while rows.len() < max
        && let Some(line) = lines.next_line()?
    {
        let line: Line<'_> = serde_json::from_str(line.trim_end()).map_err(|e| Reason::json_line(&e))?;
        let (found, name) = line.format();
        if format == Format::Auto {
            (format, detected) = (found, Some(name));
        }
        match detected {
            // A request outside of sessions.
            Some("dynamo") if found == Format::Mooncake => {}
            Some(before) if found != format => return Err(Reason::MixedFormats { before, found: name }),
            _ => {}
        }
        let is_bailian = format == Format::Bailian;
        let tokens_usual = if is_bailian { BAILIAN_HASH_TOKENS } else { HASH_BLOCK_TOKENS };
        hash_tokens = options.hash_tokens.unwrap_or(tokens_usual);
        // Bailian hashes each block separately.
        let hashing = Hashing { tokens: hash_tokens, chain: is_bailian.then_some(0) };
        let lengths = [("input_length", line.input_length), ("output_length", line.output_length)];
        let hash_ids = line.hash_ids;
        let (at_ns, turn) = at_ns(line, format, options.time_unit, &mut ends)?;
        rows.push((at_ns, Request { turn, ..hashing.request(lengths, hash_ids, options)? }));
    }
    if format == Format::Dynamo {
        // Its lines are ordered by session.
        rows.sort_by_key(|&(at_ns, _)| at_ns);
    }
    Ok((rows, hash_tokens))
}

/// Returns the arrival of a request, and its turn, by the ends of the last turns of its session. A
/// later turn arrives after its delay from the end of the previous one, or at its timestamp without
/// a delay.
fn at_ns(
    line: Line<'_>,
    format: Format,
    unit: Option<TimeUnit>,
    ends: &mut HashMap<String, (SessionId, i64)>,
) -> Result<(i64, Option<Turn>), Reason> {
    let unit = match (unit, format, line.timestamp) {
        (Some(unit), ..) => unit,
        (None, Format::Bailian, _) => TimeUnit::S,
        (None, Format::Mooncake, Some(time)) if time.fract() != 0.0 => return Err(Reason::TimeUnit(time)),
        (None, ..) => TimeUnit::Ms,
    };
    let timestamp = line.timestamp.map(|time| unit.ns("timestamp", time)).transpose()?;
    let Some(session) = line.session_id.filter(|_| format == Format::Dynamo) else {
        return timestamp.map(|at_ns| (at_ns, None)).ok_or(Reason::NoTimestamp);
    };
    let delay = line.delay_ms.map(|delay| TimeUnit::Ms.think_ns("delay_ms", delay));
    let delay = delay.or_else(|| line.delay.map(|delay| unit.think_ns("delay", delay))).transpose()?;
    let (before, next) = (ends.get(&session).copied(), SessionId(ends.len() as u64));
    let end = before.map(|(_, end)| end);
    let at_ns = match (end, delay, timestamp) {
        (Some(end), Some(delay), _) => later(end, delay)?,
        (_, _, Some(timestamp)) => timestamp,
        (end, delay, None) => later(end.unwrap_or(0), delay.unwrap_or(0))?,
    };
    let answer_ns = line.output_length.saturating_mul(ANSWER_TOKEN.as_nanos() as i64);
    let id = before.map_or(next, |(id, _)| id);
    ends.insert(session, (id, at_ns.saturating_add(answer_ns)));
    let turn = Turn { session: id, parent: None, think: think(delay, at_ns, end.unwrap_or(at_ns)) };
    Ok((at_ns, Some(turn)))
}
