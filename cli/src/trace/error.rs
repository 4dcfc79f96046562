//! Why a trace was not read: file, line, reason.

use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;

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
    /// It begins like no format that is known.
    #[error("neither a Mooncake nor an Azure trace; it begins with \"{beginning}\" (--format chooses one)")]
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
    #[error("the header has no column {column}; it is \"{found}\"")]
    Header {
        /// The column.
        column: &'static str,
        /// The header found.
        found: String,
    },
    /// The line ends before a column; cut-off lines end here.
    #[error("no value for {column}: the line has {found} columns")]
    MissingColumn {
        /// The column.
        column: &'static str,
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
        field: &'static str,
        /// What stands there.
        text: String,
    },
    /// A count that no request has.
    #[error("{field} is {value}, outside {min}..={max}")]
    OutOfRange {
        /// The field.
        field: &'static str,
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

/// The beginning of a text, short and printable, to be quoted in an error.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    const CHARS_MAX: usize = 60;
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let text = String::from_utf8_lossy(&line[..line.len().min(4 * CHARS_MAX)]);
    let mut short: String = text.trim().chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().count() > CHARS_MAX {
        short.push_str("...");
    }
    short
}
