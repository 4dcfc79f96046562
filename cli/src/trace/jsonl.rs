//! Mooncake's, Bailian's and Dynamo's traces: one JSON object a line.

use std::collections::HashMap;
use std::io::BufRead;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::Reason;
use super::hashes::checked;
use super::lines::Lines;
use super::{Format, HashIds, ReadOptions, Request, Row, Rows, TimeUnit, tokens};

/// Tokens of a prompt for one hash id, where the trace does not say otherwise.
pub const HASH_BLOCK_TOKENS: u32 = 512;

/// The same in Bailian's traces.
const BAILIAN_HASH_TOKENS: u32 = 16;

/// The time per token of an answer, before the next turn of its conversation.
pub const ANSWER_TOKEN: Duration = Duration::from_millis(30);

/// A line. Lengths are signed, so that errors quote negative ones.
#[derive(Deserialize)]
struct Line<H> {
    #[serde(alias = "created_time")]
    timestamp: Option<f64>,
    /// Time between the end of the turn before and this turn.
    #[serde(alias = "delay_ms")]
    delay: Option<f64>,
    session_id: Option<String>,
    chat_id: Option<IgnoredAny>,
    #[serde(alias = "input_tokens")]
    input_length: i64,
    #[serde(alias = "output_tokens")]
    output_length: i64,
    #[serde(default)]
    hash_ids: H,
}

/// The dialect of a trace, and the ends of its sessions' last turns in nanoseconds.
struct Reader {
    format: Format,
    hash_tokens: u32,
    time_unit: Option<TimeUnit>,
    ends: HashMap<String, i64>,
}

/// Reads up to `max` rows. Without a format, the fields of the first line decide.
pub(super) fn read<R: BufRead>(
    lines: &mut Lines<R>,
    format: Option<Format>,
    options: &ReadOptions,
    max: usize,
) -> Result<Rows, Reason> {
    let (mut reader, mut rows) = (None, Vec::new());
    while rows.len() < max
        && let Some(line) = lines.next_line()?
    {
        rows.push(match options.hash_ids {
            HashIds::Ignored => {
                let line = json(line)?;
                let reader = reader.get_or_insert_with(|| Reader::new(format, &line, options));
                reader.row(line, |_: IgnoredAny, _, _| Ok((Vec::new(), 0)))?
            }
            HashIds::Required => {
                let line = json(line)?;
                let reader = reader.get_or_insert_with(|| Reader::new(format, &line, options));
                // Bailian hashes each block by itself.
                let is_chained = reader.format != Format::Bailian;
                reader.row(line, |ids, input, size| checked(ids, input, size, is_chained))?
            }
        });
    }
    let (hash_tokens, is_dynamo) =
        reader.map_or((HASH_BLOCK_TOKENS, false), |of| (of.hash_tokens, of.format == Format::Dynamo));
    if is_dynamo {
        // Its lines are in the order of sessions.
        rows.sort_by_key(|&(at_ns, _)| at_ns);
    }
    Ok(Rows { rows, hash_tokens })
}

fn json<H: DeserializeOwned + Default>(line: &str) -> Result<Line<H>, Reason> {
    serde_json::from_str(line.trim_end()).map_err(Reason::json)
}

impl Reader {
    fn new<H>(format: Option<Format>, first: &Line<H>, options: &ReadOptions) -> Self {
        let format = format.unwrap_or(match first {
            Line { chat_id: Some(_), .. } => Format::Bailian,
            Line { session_id: Some(_), .. } => Format::Dynamo,
            _ => Format::Mooncake,
        });
        let (size, unit) = match format {
            Format::Bailian => (BAILIAN_HASH_TOKENS, Some(TimeUnit::S)),
            Format::Dynamo => (HASH_BLOCK_TOKENS, Some(TimeUnit::Ms)),
            _ => (HASH_BLOCK_TOKENS, None),
        };
        let hash_tokens = options.hash_tokens.unwrap_or(size);
        Self { format, hash_tokens, time_unit: options.time_unit.or(unit), ends: HashMap::new() }
    }

    fn row<H>(
        &mut self,
        line: Line<H>,
        ids: impl FnOnce(H, u32, u32) -> Result<(Vec<u64>, u32), Reason>,
    ) -> Result<Row, Reason> {
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        let output_tokens = tokens("output_length", line.output_length, 0)?;
        let at_ns = self.at_ns(line.session_id, line.timestamp, line.delay, output_tokens)?;
        let mut request = Request::new(Duration::ZERO, input_tokens, output_tokens);
        (request.hash_ids, request.hashed_tokens) = ids(line.hash_ids, input_tokens, self.hash_tokens)?;
        Ok((at_ns, request))
    }

    /// Returns the arrival of a request. A later turn of a session arrives by its delay after the
    /// end of the turn before, or at its timestamp if it has no delay.
    fn at_ns(
        &mut self,
        session: Option<String>,
        timestamp: Option<f64>,
        delay: Option<f64>,
        output_tokens: u32,
    ) -> Result<i64, Reason> {
        if let (None, Some(time)) = (self.time_unit, timestamp)
            && time.fract() != 0.0
        {
            return Err(Reason::TimeUnit(time));
        }
        let unit = self.time_unit.unwrap_or(TimeUnit::Ms);
        let timestamp = timestamp.map(|time| unit.ns("timestamp", time)).transpose()?;
        let Some(session) = session.filter(|_| self.format == Format::Dynamo) else {
            return timestamp.ok_or(Reason::NoTimestamp);
        };
        let delay = delay.map(|delay| unit.ns("delay", delay)).transpose()?;
        let at_ns = match (self.ends.get(&session), delay, timestamp) {
            (Some(end), Some(delay), _) => end.saturating_add(delay),
            (_, _, Some(timestamp)) => timestamp,
            (end, delay, None) => end.copied().unwrap_or(0).saturating_add(delay.unwrap_or(0)),
        };
        let answer_ns = i64::from(output_tokens) * ANSWER_TOKEN.as_nanos() as i64;
        self.ends.insert(session, at_ns.saturating_add(answer_ns));
        Ok(at_ns)
    }
}
