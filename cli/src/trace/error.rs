//! Why a trace was not read: file, line, reason.

use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::output::printable;

/// Why a trace was not read.
#[derive(Debug, Error)]
pub struct TraceError {
    /// The file.
    pub file: Arc<str>,
    /// The line, from 1, if the reason lies in one.
    pub line: Option<u64>,
    /// What is wrong.
    #[source]
    pub reason: Reason,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file, self.reason),
            None => write!(f, "{}: {}", self.file, self.reason),
        }
    }
}

/// What is wrong with a trace or with one of its lines.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Reason {
    /// The file could not be opened.
    #[error("cannot open: {0}")]
    Open(io::Error),
    /// The path names a directory.
    #[error("is a directory, not a trace")]
    Directory,
    /// Reading failed midway.
    #[error("cannot read: {0}")]
    Read(io::Error),
    /// There is no request in it.
    #[error("empty: not one request")]
    Empty,
    /// The file is compressed.
    #[error(
        "compressed with {by}; decompress it first (traces are read as plain text, `-` is the standard input)"
    )]
    Compressed {
        /// The program that reads it.
        by: &'static str,
    },
    /// The file is text, but not in UTF-8.
    #[error("text in UTF-16; convert it to UTF-8 first (iconv -f UTF-16 -t UTF-8)")]
    Utf16,
    /// It begins like no format that is known.
    #[error(
        "neither a Mooncake nor an Azure trace; it begins with \"{beginning}\" (--format chooses one, --columns names the columns of other CSV files)"
    )]
    UnknownFormat {
        /// How it begins.
        beginning: String,
    },
    /// The line has no end within the bound.
    #[error("line longer than {max} bytes")]
    LineTooLong {
        /// The bound.
        max: usize,
    },
    /// The line is not text.
    #[error("not UTF-8, at byte {at} of the line")]
    NotUtf8 {
        /// The first byte that is none, from 0.
        at: usize,
    },
    /// The line is no JSON object of the expected fields; cut-off lines end here.
    #[error("{message}, at column {column}")]
    Json {
        /// What the parser said.
        message: String,
        /// Where, from 1.
        column: usize,
    },
    /// The header lacks a column.
    #[error("the header has no column {column}; its columns are {found} (--columns names others)")]
    Header {
        /// The column.
        column: String,
        /// The columns found.
        found: String,
    },
    /// The line ends before a column; cut-off lines end here.
    #[error("no value for {column}: the line has {found} columns")]
    MissingColumn {
        /// The column.
        column: String,
        /// How many there are.
        found: usize,
    },
    /// The line has more columns than are believed.
    #[error("more than {max} columns")]
    TooManyColumns {
        /// The bound.
        max: usize,
    },
    /// A carriage return within a line: either what ends its lines, which are then all one, or damage.
    #[error("a carriage return without a line feed, before byte {at} of the line")]
    LineEnd {
        /// The byte after it, from 0.
        at: usize,
    },
    /// More requests than are held in memory.
    #[error("more than {max} requests; --requests takes the first ones")]
    TooManyRequests {
        /// The bound.
        max: usize,
    },
    /// Not a whole number.
    #[error("{field} is no whole number: \"{text}\"")]
    Number {
        /// The field.
        field: String,
        /// What stands there.
        text: String,
    },
    /// A count that no request has.
    #[error("{field} is {value}, outside {min}..={max}")]
    OutOfRange {
        /// The field.
        field: String,
        /// What stands there.
        value: i64,
        /// The least that is believed.
        min: u32,
        /// The most that is believed.
        max: u32,
    },
    /// Not a time.
    #[error("timestamp \"{text}\": {message}")]
    Timestamp {
        /// What stands there.
        text: String,
        /// Why it is none.
        message: String,
    },
    /// The line has no hash ids, although prefixes are reused.
    #[error("no hash_ids, so that nothing says which prompts this one begins like")]
    NoHashIds,
    /// A hash id occurs twice. It stands for the whole prompt up to the end of its block, so that
    /// it can occur once.
    #[error("hash_ids repeat {id} within one prompt, at places {first} and {second}")]
    RepeatedHashId {
        /// The id.
        id: u64,
        /// Its first place, from 1.
        first: usize,
        /// Its second place.
        second: usize,
    },
    /// As many hash ids as the prompt cannot have.
    #[error("{found} hash_ids for {input} tokens, which are {expected} blocks of 512")]
    HashIds {
        /// Ids in the line.
        found: usize,
        /// Tokens of the prompt.
        input: u32,
        /// Ids that the prompt should have.
        expected: usize,
    },
}

/// The beginning of a text's first line, short and printable, to be quoted in an error.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    const CHARS_MAX: usize = 60;
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let text = String::from_utf8_lossy(&line[..line.len().min(4 * CHARS_MAX)]);
    clip(text.trim().chars().flat_map(char::escape_debug), CHARS_MAX)
}

/// The message of another parser, which may quote the input, short and printable.
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
