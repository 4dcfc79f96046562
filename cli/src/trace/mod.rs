//! Traces: the arrivals of requests, and the tokens of their prompts and answers.
//!
//! A reader for each format parses one line at a time, or one session of an agent; [`Trace::load`]
//! sorts the requests by their arrival.
//!
//! | format | line |
//! |---|---|
//! | Mooncake | `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one id per 512 tokens]}` |
//! | Bailian | the same and `chat_id`; the timestamp in seconds, one id per 16 tokens, each of its block alone |
//! | Dynamo | Mooncake's and `session_id`; in later turns `delay` (ms after the answer before) for the timestamp |
//! | agents | a file a session: `{"block_size": n, "requests": [{"t": s, "in": n, "out": n, "hash_ids": []}]}` |
//! | Azure | `TIMESTAMP,ContextTokens,GeneratedTokens` under a header, columns in any order, others ignored; other [names](Columns) |
//!
//! A hash id identifies the whole prompt up to the end of its tokens: equal ids mean equal
//! prefixes, and a prompt has each id once. Ids of single blocks (Bailian) are chained to obtain
//! these. They are read only if [prefixes are reused](HashIds).
//!
//! Recorded times apply if a trace has them. A turn with a delay instead arrives that long after
//! the previous answer, which takes [`ANSWER_TOKEN`] per token.
//!
//! Requests have their [`Turn`] where the format has sessions (Dynamo, agents): the session, and
//! the think time, which is the recorded one, or else the time since the end of the previous
//! answer. A subagent nested in a session is a session of its own.
//!
//! A trace is untrusted: line lengths and numbers are bounded, and a violation is a [`TraceError`]
//! with file, line and reason. Lines may be out of order, as in traces merged from several front
//! ends: requests are sorted by arrival, equal ones in file order, and [`Trace::out_of_order`]
//! counts them.

mod agents;
mod beginning;
#[cfg(feature = "compressed")]
mod compressed;
mod csv;
mod error;
mod generated;
mod hashes;
mod jsonl;
mod lines;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use kvpool::SessionId;

use crate::output::printable;

pub use csv::Columns;
pub use error::{Reason, TraceError};
pub use generated::Generated;
pub use kvpool_load::{ANSWER_TOKEN, HASH_BLOCK_TOKENS, Request, Turn};
pub use lines::LINE_BYTES_MAX;

use beginning::{beginning, not_text, text_of};
use lines::Lines;

/// Maximum length of a prompt and of an answer, in tokens: far above any model's context, so a
/// greater number means a damaged line.
pub const TOKENS_MAX: u32 = 1 << 24;

/// Most requests in memory: an endless input must not exhaust it.
pub const REQUESTS_MAX: u32 = if cfg!(test) { 20_000 } else { 10_000_000 };

/// The format of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum Format {
    /// Detect the format by the first line
    #[default]
    Auto,
    /// JSON lines: timestamp (ms), input_length, output_length, hash_ids (of 512 tokens)
    Mooncake,
    /// Mooncake's lines with chat_id: timestamp in seconds, hash_ids of 16 tokens
    Bailian,
    /// Mooncake's lines with session_id, and delay (ms) between the turns of a session
    Dynamo,
    /// Sessions of agents (kv-cache-tester): a JSON file a session, or a folder of them
    Agents,
    /// CSV: TIMESTAMP, ContextTokens, GeneratedTokens, or the names in --columns
    #[value(alias = "csv")]
    Azure,
}

impl Format {
    fn detect(text: &[u8], columns: &Columns) -> Option<Self> {
        let header = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
        // One column is enough: the error for a header that lacks another names it.
        let is_in = |text: &[u8], name: &str| {
            text.windows(name.len().max(1)).any(|part| part.eq_ignore_ascii_case(name.as_bytes()))
        };
        match text.first() {
            Some(b'{') if ["\"block_size\"", "\"requests\""].into_iter().all(|key| is_in(text, key)) => {
                Some(Self::Agents)
            }
            // The fields of the first line decide.
            Some(b'{') => Some(Self::Auto),
            _ if columns.names().into_iter().any(|name| is_in(header, name)) => Some(Self::Azure),
            _ => None,
        }
    }
}

/// The unit of the times of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum TimeUnit {
    /// Seconds
    S,
    /// Milliseconds
    Ms,
}

impl TimeUnit {
    /// Returns a time of this field in nanoseconds, if it fits into 63 bits.
    fn ns(self, field: &'static str, time: f64) -> Result<i64, Reason> {
        self.ns_up_to(NS_MAX, field, time)
    }

    /// Returns the duration of a request, or between two requests, in nanoseconds.
    fn think_ns(self, field: &'static str, time: f64) -> Result<i64, Reason> {
        self.ns_up_to(THINK_MAX.as_nanos() as f64, field, time)
    }

    fn ns_up_to(self, ns_max: f64, field: &'static str, time: f64) -> Result<i64, Reason> {
        let (unit_ns, unit) = match self {
            Self::S => (1e9, "s"),
            Self::Ms => (1e6, "ms"),
        };
        // Excludes NaN.
        if (0.0..=ns_max / unit_ns).contains(&time) {
            return Ok((time * unit_ns) as i64);
        }
        let message = format!("outside 0..={:e} {unit}", ns_max / unit_ns);
        Err(Reason::Timestamp { field, text: error::excerpt(time.to_string().as_bytes()), message })
    }
}

/// The longest time between an answer and the next request of its session: a year.
pub const THINK_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The latest time in a trace, in nanoseconds.
const NS_MAX: f64 = 9e18;

/// Adds nanoseconds to a time.
fn later(at_ns: i64, delay_ns: i64) -> Result<i64, Reason> {
    at_ns.checked_add(delay_ns).filter(|&at_ns| at_ns <= NS_MAX as i64).ok_or(Reason::TooLate)
}

/// Returns the think time before a request that arrives at `at_ns`: the recorded one, or the time
/// since the end of the previous answer.
fn think(recorded_ns: Option<i64>, at_ns: i64, end_ns: i64) -> Duration {
    Duration::from_nanos(recorded_ns.unwrap_or(at_ns.saturating_sub(end_ns)).max(0) as u64)
}

/// Whether the hash ids of a trace are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HashIds {
    /// Neither read nor required.
    #[default]
    Ignored,
    /// Every line of a format that has them must have valid ones.
    Required,
}

/// Options for reading a trace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReadOptions {
    /// The format.
    pub format: Format,
    /// Tokens per hash id; by default those of the format.
    pub hash_tokens: Option<u32>,
    /// The unit of times in JSON; by default that of the format.
    pub time_unit: Option<TimeUnit>,
    /// The columns of a CSV file.
    pub columns: Columns,
    /// Whether hash ids are read.
    pub hash_ids: HashIds,
    /// Requests to read, from the first on; by default all.
    pub limit: Option<usize>,
    /// The number of a session in its folder, which distinguishes its hash ids.
    pub session: u64,
}

/// A row of a trace: its time in nanoseconds since the format's origin (the start of the trace, or
/// 1970), and the request, without an arrival yet.
type Row = (i64, Request);

/// The requests of a trace, in order of arrival.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    /// Name in reports.
    pub name: String,
    /// The requests; the first arrives at zero.
    pub requests: Vec<Request>,
    /// Tokens per hash id.
    pub hash_tokens: u32,
    /// Number of lines after a line with a later time.
    pub out_of_order: usize,
}

impl Trace {
    /// Reads a file, or a folder of [sessions](Format::Agents); `-` is the standard input.
    ///
    /// # Errors
    /// [`TraceError`], with the line if there is one: the file cannot be read, or is not a trace.
    pub fn load(path: &Path, options: &ReadOptions) -> Result<Self, TraceError> {
        if path == Path::new("-") {
            return Self::read("standard input".into(), io::stdin().lock(), options);
        }
        let name: Arc<str> = printable(&path.display().to_string()).into();
        let fail = |reason| TraceError { file: Arc::clone(&name), line: None, reason };
        let file = File::open(path).map_err(|e| fail(Reason::Open(e)))?;
        if file.metadata().map_err(|e| fail(Reason::Open(e)))?.is_dir() {
            let files = session_files(path).map_err(|e| fail(Reason::Open(e)))?;
            return Self::load_sessions(&name, files, options, Reason::Directory);
        }
        Self::read(Arc::clone(&name), BufReader::with_capacity(1 << 16, file), options)
    }

    /// Reads one of these, or several files and folders, which are [sessions](Format::Agents).
    ///
    /// # Errors
    /// Those of [`load`](Self::load), with the file.
    pub fn load_all(paths: &[PathBuf], options: &ReadOptions) -> Result<Self, TraceError> {
        if let [path] = paths {
            return Self::load(path, options);
        }
        let mut files = Vec::new();
        for path in paths {
            let file = || printable(&path.display().to_string()).into();
            let fail = |reason| TraceError { file: file(), line: None, reason };
            if path.is_dir() {
                files.append(&mut session_files(path).map_err(|e| fail(Reason::Open(e)))?);
            } else {
                files.push(path.clone());
            }
        }
        let name = format!("{} files", paths.len());
        Self::load_sessions(&name.into(), files, options, Reason::SeveralFiles)
    }

    /// Reads sessions, which begin together; `none` is the reason if there are none.
    fn load_sessions(
        name: &Arc<str>,
        mut paths: Vec<PathBuf>,
        options: &ReadOptions,
        none: Reason,
    ) -> Result<Self, TraceError> {
        let fail = |reason| TraceError { file: Arc::clone(name), line: None, reason };
        if !matches!(options.format, Format::Auto | Format::Agents) {
            paths.clear();
        }
        let (mut all, mut sessions): (Option<Self>, _) = (None, 0);
        for (session, path) in (0..).zip(&paths) {
            let options = ReadOptions { format: Format::Agents, session, ..options.clone() };
            let mut trace = Self::load(path, &options)?;
            sessions = trace.renumber_sessions(sessions);
            let all = all.get_or_insert_with(|| Self { requests: Vec::new(), ..trace.clone() });
            let (found, before) = (trace.hash_tokens, all.hash_tokens);
            all.requests.extend(trace.requests);
            if found != before {
                let (file, reason) = (trace.name.into(), Reason::BlockSize { found, before });
                return Err(TraceError { file, line: None, reason });
            }
            if all.requests.len() > REQUESTS_MAX as usize {
                return Err(fail(Reason::TooManyRequests(REQUESTS_MAX as usize)));
            }
        }
        let Self { mut requests, hash_tokens, .. } = all.ok_or_else(|| fail(none))?;
        requests.sort_by_key(|request| request.arrival);
        requests.truncate(options.limit.unwrap_or(usize::MAX));
        Ok(Self { name: name.to_string(), requests, hash_tokens, out_of_order: 0 })
    }

    /// Reads any source of bytes.
    pub fn read<R: BufRead>(file: Arc<str>, input: R, options: &ReadOptions) -> Result<Self, TraceError> {
        let (max, mut line) = (REQUESTS_MAX as usize, None);
        let limit = options.limit.unwrap_or(usize::MAX).min(max + 1);
        #[cfg(feature = "compressed")]
        let found = compressed::text(input).and_then(|text| rows(text, options, limit, &mut line));
        #[cfg(not(feature = "compressed"))]
        let found = rows(input, options, limit, &mut line);
        let rows = match found {
            Ok((rows, _)) if rows.len() > max => Err((None, Reason::TooManyRequests(max))),
            Ok((rows, _)) if rows.is_empty() => Err((None, Reason::Empty)),
            rows => rows.map_err(|reason| (line, reason)),
        };
        match rows {
            Ok(rows) => Ok(Self::from_rows(file.to_string(), rows)),
            Err((line, reason)) => Err(TraceError { file, line, reason }),
        }
    }

    /// Adds a number to the ids of the sessions. Returns the first greater id.
    fn renumber_sessions(&mut self, first: u64) -> u64 {
        let mut next = first;
        for turn in self.requests.iter_mut().filter_map(|request| request.turn.as_mut()) {
            turn.session.0 += first;
            turn.parent = turn.parent.map(|SessionId(parent)| SessionId(first + parent));
            next = next.max(turn.session.0 + 1);
        }
        next
    }

    fn from_rows(name: String, (mut rows, hash_tokens): (Vec<Row>, u32)) -> Self {
        let (mut latest, mut out_of_order) = (i64::MIN, 0);
        for &(at_ns, _) in &rows {
            out_of_order += usize::from(at_ns < latest);
            latest = latest.max(at_ns);
        }
        rows.sort_by_key(|&(at_ns, _)| at_ns);
        let zero = rows.first().map_or(0, |&(at_ns, _)| at_ns);
        let arrive = |(at_ns, request): Row| Request {
            arrival: Duration::from_nanos(at_ns.abs_diff(zero)),
            ..request
        };
        Self { name, requests: rows.into_iter().map(arrive).collect(), hash_tokens, out_of_order }
    }

    /// Returns whether no request has hash ids, by which common prefixes are known.
    pub fn has_no_hash_ids(&self) -> bool {
        self.requests.iter().all(|request| request.hash_ids.is_empty())
    }

    /// Returns the time from the first arrival to the last.
    pub fn span(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |request| request.arrival)
    }
}

/// Returns the files of sessions in a folder, in order of their names.
fn session_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let files = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let mut paths: Vec<_> = files.iter().map(fs::DirEntry::path).collect();
    let ends = [".json", ".json.gz", ".json.zst"];
    let is_named = |path: &Path| ends.iter().any(|end| path.to_string_lossy().ends_with(end));
    paths.retain(|path| is_named(path) && !path.is_dir());
    paths.sort();
    Ok(paths)
}

/// Reads up to `max` rows in the detected format. Sets `line` to the line of an error.
fn rows<R: BufRead>(
    mut input: R,
    options: &ReadOptions,
    max: usize,
    line: &mut Option<u64>,
) -> Result<(Vec<Row>, u32), Reason> {
    let beginning = beginning(&mut input).map_err(Reason::Read)?;
    if let Some(reason) = not_text(&beginning) {
        return Err(reason);
    }
    let text = text_of(&beginning);
    if text.is_empty() {
        return Err(Reason::Empty);
    }
    let blank = &beginning[..beginning.len() - text.len()];
    let first_line = Some(1 + blank.iter().filter(|&&byte| byte == b'\n').count() as u64);
    if text.starts_with(b"[") && options.format != Format::Azure {
        *line = first_line;
        return Err(Reason::JsonArray);
    }
    let format = match options.format {
        Format::Auto => Format::detect(text, &options.columns),
        format => Some(format),
    };
    let Some(format) = format else {
        *line = first_line;
        let first = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
        return Err(match std::str::from_utf8(first) {
            // A character cut off by the end of the beginning is not an error.
            Err(e) if e.error_len().is_some() => Reason::NotUtf8(e.valid_up_to()),
            _ => Reason::UnknownFormat(error::excerpt(first)),
        });
    };
    let input = Cursor::new(beginning).chain(input);
    if format == Format::Agents {
        let (mut rows, hash_tokens) = agents::read(input, options, line)?;
        rows.truncate(max);
        return Ok((rows, hash_tokens));
    }
    if format == Format::Azure && (options.hash_tokens.is_some() || options.time_unit.is_some()) {
        return Err(Reason::OptionsOfJson);
    }
    let mut lines = Lines::new(input);
    let rows = match format {
        Format::Azure => csv::read(&mut lines, &options.columns, max).map(|rows| (rows, HASH_BLOCK_TOKENS)),
        format => jsonl::read(&mut lines, format, options, max),
    };
    *line = Some(lines.number());
    rows
}

fn tokens(field: &str, value: i64, min: u32) -> Result<u32, Reason> {
    match u32::try_from(value) {
        Ok(count) if (min..=TOKENS_MAX).contains(&count) => Ok(count),
        _ => Err(Reason::OutOfRange { field: field.to_owned(), value, min, max: TOKENS_MAX }),
    }
}
