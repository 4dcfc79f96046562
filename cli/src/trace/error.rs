//! Errors of traces: file, line, reason.

use std::io;
use std::sync::Arc;

use indicatif::HumanCount;
use thiserror::Error;

use crate::output::printable;

/// Why a trace was not read.
#[derive(Debug, Error)]
#[error("{file}{}: {reason}", .line.map_or(String::new(), |line| format!(":{line}")))]
pub struct TraceError {
    /// The file.
    pub file: Arc<str>,
    /// The line, from 1, if the reason is in one.
    pub line: Option<u64>,
    /// The reason.
    #[source]
    pub reason: Reason,
}

/// A fault of a trace or of one of its lines. The messages quote the input, and are short and
/// printable.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Reason {
    #[error("cannot open: {0}")]
    Open(io::Error),
    #[error(
        "is a directory; only sessions of agents are read from one, files NAME.json (--format agents, or none)"
    )]
    Directory,
    #[error(
        "several files are read as sessions of agents only, NAME.json in folders (--format agents, or none)"
    )]
    SeveralFiles,
    #[error("cannot read: {0}")]
    Read(io::Error),
    #[error("empty: it has no request")]
    Empty,
    #[cfg_attr(
        feature = "compressed",
        error(
            "compressed with {0}; decompress it first (`-` is the standard input): gzip and zstd are read, once"
        )
    )]
    #[cfg_attr(
        not(feature = "compressed"),
        error(
            "compressed with {0}; decompress it first (`-` is the standard input), or for gzip and zstd build this program with `cargo install --path cli --features compressed`"
        )
    )]
    Compressed(&'static str),
    #[error("text in UTF-16; convert it to UTF-8 first (iconv -f UTF-16 -t UTF-8)")]
    Utf16,
    #[error(
        "neither a trace in JSON nor an Azure trace; it begins with \"{0}\" (--format chooses one, --columns names the columns of other CSV files)"
    )]
    UnknownFormat(String),
    #[error("a JSON array; a trace in JSON has one object a line (`jq -c '.[]'` converts it)")]
    JsonArray,
    #[error("line longer than {} bytes", HumanCount(*.0 as u64))]
    LineTooLong(usize),
    #[error("not UTF-8, at byte {0} of the line")]
    NotUtf8(usize),
    #[error("larger than {} bytes", HumanCount(*.0))]
    TooLarge(u64),
    #[error("{place}: {reason}")]
    Within { place: String, reason: Box<Reason> },
    #[error("missing field `{0}`")]
    Missing(&'static str),
    #[error("{message}, at column {column}")]
    Json { message: String, column: usize },
    #[error("the header has no column {column}; its columns are {found} (--columns names others)")]
    Header { column: String, found: String },
    #[error("the header has the column {0} twice")]
    RepeatedColumn(String),
    #[error("no value for {column}: the line has {found} columns")]
    MissingColumn { column: String, found: usize },
    #[error("more than {0} columns")]
    TooManyColumns(usize),
    #[error("more than {} requests; --requests takes the first ones", HumanCount(*.0 as u64))]
    TooManyRequests(usize),
    #[error("{field} is not a whole number: \"{text}\"")]
    Number { field: String, text: String },
    #[error("{field} is {value}, outside {min}..={}", HumanCount((*.max).into()))]
    OutOfRange { field: String, value: i64, min: u32, max: u32 },
    #[error("{field} \"{text}\": {message}")]
    Timestamp { field: &'static str, text: String, message: String },
    #[error("more than 285 years after the beginning of the trace")]
    TooLate,
    #[error("no timestamp, and no session_id whose turns follow one another")]
    NoTimestamp,
    #[error(
        "timestamp {0} is not a whole number of milliseconds: --time-unit s or --time-unit ms tells its unit (and --hash-tokens the tokens of one of the hash_ids, if not 512)"
    )]
    TimeUnit(f64),
    #[error("a line of the format {found} in a trace that begins as {before} (--format chooses one for all)")]
    MixedFormats { before: &'static str, found: &'static str },
    #[error("--hash-tokens and --time-unit are for traces in JSON, and this one is CSV")]
    OptionsOfJson,
    #[error("block_size is {found}, and {before} in the sessions before")]
    BlockSize { found: u32, before: u32 },
    #[error("no hash_ids, which identify common prefixes of prompts")]
    NoHashIds,
    #[error("hash_ids repeat {id} within one prompt, at places {first} and {second}")]
    RepeatedHashId { id: u64, first: usize, second: usize },
    #[error(
        "{found} hash_ids for {input} tokens, which have {expected} blocks of {size} (--hash-tokens tells another size)"
    )]
    HashIds { found: usize, input: u32, expected: usize, size: u32 },
}

impl Reason {
    pub(super) fn json(error: &serde_json::Error) -> Self {
        let message = error.to_string();
        let message = quote(message.split(" at line ").next().unwrap_or_default());
        let message = if error.is_data() { message } else { format!("not valid JSON: {message}") };
        Self::Json { message, column: error.column() }
    }

    /// Returns the reason of an error in a line that must be one object.
    pub(super) fn json_line(error: &serde_json::Error) -> Self {
        match Self::json(error) {
            Self::Json { message, column } if error.is_eof() => {
                Self::Json { message: format!("{message} (a request is one line)"), column }
            }
            reason => reason,
        }
    }

    /// Returns this reason, with the affected part of the input.
    pub(super) fn within(self, place: &str) -> Self {
        Self::Within { place: place.to_owned(), reason: Box::new(self) }
    }
}

/// Returns the beginning of a text's first line, to be quoted in an error.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    const CHARS_MAX: usize = 60;
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let text = String::from_utf8_lossy(&line[..line.len().min(4 * CHARS_MAX)]);
    clip(text.trim().chars().flat_map(char::escape_debug), CHARS_MAX)
}

/// Returns the message of another parser, which may quote the input.
pub(super) fn quote(message: &str) -> String {
    const CHARS_MAX: usize = 160;
    clip(printable(message).chars(), CHARS_MAX)
}

fn clip(mut chars: impl Iterator<Item = char>, chars_max: usize) -> String {
    let mut short: String = chars.by_ref().take(chars_max).collect();
    if chars.next().is_some() {
        short.push_str("...");
    }
    short
}
