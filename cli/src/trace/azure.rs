//! Azure's traces: CSV with a header.

use std::io::BufRead;
use std::sync::Arc;

use csv_core::{ReadRecordResult, Reader as Csv};
use jiff::{Timestamp, civil, tz::TimeZone};

use super::error::{Reason, TraceError, excerpt};
use super::lines::Lines;
use super::{Row, tokens};

/// The columns that are read, in the order of a row's fields.
pub(super) const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

/// Columns that a line may have.
const COLUMNS_MAX: usize = 64;

/// Reads an Azure trace row by row.
pub struct AzureReader<R> {
    file: Arc<str>,
    lines: Lines<R>,
    fields: Fields,
    /// Where in a line each of [`COLUMNS`] stands.
    places: [usize; 3],
    ended: bool,
}

impl<R: BufRead> AzureReader<R> {
    /// A reader of `input`, past its header; `file` is its name in errors.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: no header, or one that lacks a column.
    pub fn new(file: Arc<str>, input: R) -> Result<Self, TraceError> {
        let mut lines = Lines::new(input);
        let mut fields = Fields::new();
        match header(&mut lines, &mut fields) {
            Ok(places) => Ok(Self { file, lines, fields, places, ended: false }),
            Err(reason) => Err(TraceError { file, line: Some(lines.number()), reason }),
        }
    }

    fn row(&mut self) -> Result<Option<Row>, Reason> {
        let Some(line) = self.lines.next_line()? else { return Ok(None) };
        self.fields.split(line)?;
        let [at, input, output] =
            [0, 1, 2].map(|column| self.fields.get(COLUMNS[column], self.places[column]));
        Ok(Some(Row {
            at_ns: instant_ns(at?)?,
            input_tokens: tokens(COLUMNS[1], whole(COLUMNS[1], input?)?, 1)?,
            output_tokens: tokens(COLUMNS[2], whole(COLUMNS[2], output?)?, 0)?,
            hash_ids: Vec::new(),
        }))
    }
}

impl<R: BufRead> Iterator for AzureReader<R> {
    type Item = Result<Row, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let row = self.row().transpose();
        self.ended = !matches!(row, Some(Ok(_)));
        row.map(|row| {
            row.map_err(|reason| TraceError {
                file: Arc::clone(&self.file),
                line: Some(self.lines.number()),
                reason,
            })
        })
    }
}

fn header<R: BufRead>(lines: &mut Lines<R>, fields: &mut Fields) -> Result<[usize; 3], Reason> {
    let line = lines.next_line()?.ok_or(Reason::Empty)?;
    fields.split(line)?;
    let mut places = [0; 3];
    for (place, column) in places.iter_mut().zip(COLUMNS) {
        *place = fields
            .iter()
            .position(|field| field.trim().eq_ignore_ascii_case(column))
            .ok_or_else(|| Reason::Header { column, found: excerpt(line.as_bytes()) })?;
    }
    Ok(places)
}

/// The fields of one line, unquoted, in buffers that are used again.
struct Fields {
    csv: Csv,
    text: Vec<u8>,
    ends: Vec<usize>,
    count: usize,
}

impl Fields {
    fn new() -> Self {
        Self { csv: Csv::new(), text: Vec::new(), ends: Vec::new(), count: 0 }
    }

    fn split(&mut self, line: &str) -> Result<(), Reason> {
        // Unquoting only shortens, so that the fields fit into as many bytes as the line has.
        self.text.resize(line.len().max(1), 0);
        self.ends.resize(COLUMNS_MAX, 0);
        self.csv.reset();
        let (mut read, mut written, mut ended) = (0, 0, 0);
        loop {
            let (result, bytes_in, bytes_out, ends) = self.csv.read_record(
                &line.as_bytes()[read..],
                &mut self.text[written..],
                &mut self.ends[ended..],
            );
            (read, written, ended) = (read + bytes_in, written + bytes_out, ended + ends);
            self.count = ended;
            match result {
                // Empty input tells the parser that the line has ended.
                ReadRecordResult::InputEmpty => {}
                // A lone carriage return ends a record for the parser: what follows would be lost without a word.
                ReadRecordResult::Record if read < line.len() => {
                    return Err(Reason::LineEnd { at: read });
                }
                ReadRecordResult::Record | ReadRecordResult::End => return Ok(()),
                ReadRecordResult::OutputFull | ReadRecordResult::OutputEndsFull => {
                    return Err(Reason::TooManyColumns { max: COLUMNS_MAX });
                }
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.count).map(|place| {
            let start = if place == 0 { 0 } else { self.ends[place - 1] };
            // Fields are cut at ASCII bytes of a text that was UTF-8, and stay so.
            std::str::from_utf8(&self.text[start..self.ends[place]]).unwrap_or_default()
        })
    }

    fn get(&self, column: &'static str, place: usize) -> Result<&str, Reason> {
        match self.iter().nth(place).map(str::trim) {
            Some(field) if !field.is_empty() => Ok(field),
            _ => Err(Reason::MissingColumn { column, found: self.count }),
        }
    }
}

fn whole(field: &'static str, text: &str) -> Result<i64, Reason> {
    text.parse().map_err(|_| Reason::Number { field, text: excerpt(text.as_bytes()) })
}

/// `2023-11-16 18:17:03.9799600`, with an offset from UTC (as in the traces of 2024) or without.
fn instant_ns(text: &str) -> Result<i64, Reason> {
    let fail = |message: String| Reason::Timestamp { text: excerpt(text.as_bytes()), message };
    let timestamp = match text.parse::<Timestamp>() {
        Ok(timestamp) => timestamp,
        Err(_) => {
            let local: civil::DateTime = text.parse().map_err(|e: jiff::Error| fail(e.to_string()))?;
            TimeZone::UTC.to_timestamp(local).map_err(|e| fail(e.to_string()))?
        }
    };
    i64::try_from(timestamp.as_nanosecond()).map_err(|_| fail("outside 1677..=2262".to_owned()))
}
