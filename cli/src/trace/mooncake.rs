//! Mooncake's traces: one JSON object a line.

use std::collections::HashMap;
use std::io::BufRead;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::{Reason, excerpt, quote};
use super::lines::Lines;
use super::{HashIds, Request, Row, tokens};

/// Tokens of a prompt for one hash id.
pub const HASH_BLOCK_TOKENS: u32 = 512;

/// The latest time, in milliseconds: it still fits into nanoseconds of 63 bits.
const TIMESTAMP_MS_MAX: f64 = 9e12;

/// A line. Lengths are signed, so that errors quote negative ones.
#[derive(Deserialize)]
struct Line<H> {
    /// Milliseconds from the start of the trace or from 1970; whole in the published traces.
    timestamp: f64,
    input_length: i64,
    output_length: i64,
    #[serde(default)]
    hash_ids: H,
}

/// Reads up to `max` rows.
pub(super) fn read<R: BufRead>(
    lines: &mut Lines<R>,
    hash_ids: HashIds,
    max: usize,
) -> Result<Vec<Row>, Reason> {
    let mut rows = Vec::new();
    while rows.len() < max
        && let Some(line) = lines.next_line()?
    {
        rows.push(match hash_ids {
            HashIds::Ignored => row(json(line)?, |_: IgnoredAny, _| Ok(Vec::new()))?,
            HashIds::Required => row(json(line)?, checked)?,
        });
    }
    Ok(rows)
}

fn json<H: DeserializeOwned + Default>(line: &str) -> Result<Line<H>, Reason> {
    serde_json::from_str(line.trim_end()).map_err(|e| {
        // The parser counts lines too, and its only line is always the first.
        let message = e.to_string();
        let message = quote(message.split(" at line ").next().unwrap_or_default());
        Reason::Json { message, column: e.column() }
    })
}

fn row<H>(line: Line<H>, ids: impl FnOnce(H, u32) -> Result<Vec<u64>, Reason>) -> Result<Row, Reason> {
    if !(0.0..=TIMESTAMP_MS_MAX).contains(&line.timestamp) {
        let message = format!("outside 0..={TIMESTAMP_MS_MAX} ms");
        return Err(Reason::Timestamp { text: excerpt(line.timestamp.to_string().as_bytes()), message });
    }
    let input_tokens = tokens("input_length", line.input_length, 1)?;
    let output_tokens = tokens("output_length", line.output_length, 0)?;
    let mut request = Request::new(Duration::ZERO, input_tokens, output_tokens);
    request.hash_ids = ids(line.hash_ids, input_tokens)?;
    request.hashed_tokens = if request.hash_ids.is_empty() { 0 } else { input_tokens };
    Ok(((line.timestamp * 1e6) as i64, request))
}

/// Returns the ids if a prompt of `input_tokens` tokens can have them.
fn checked(ids: Option<Vec<u64>>, input_tokens: u32) -> Result<Vec<u64>, Reason> {
    let ids = ids.ok_or(Reason::NoHashIds)?;
    let expected = input_tokens.div_ceil(HASH_BLOCK_TOKENS) as usize;
    if ids.len() != expected {
        return Err(Reason::HashIds { found: ids.len(), input: input_tokens, expected });
    }
    let mut places = HashMap::with_capacity(ids.len());
    for (&id, second) in ids.iter().zip(1..) {
        if let Some(first) = places.insert(id, second) {
            return Err(Reason::RepeatedHashId { id, first, second });
        }
    }
    Ok(ids)
}
