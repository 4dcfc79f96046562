//! Azure's traces, and others like them: CSV with a header.

use std::io::BufRead;
use std::sync::Arc;

use csv_core::{ReadRecordResult, Reader as Csv};
use jiff::{Timestamp, civil, tz::TimeZone};

use super::columns::Columns;
use super::error::{Reason, TraceError, excerpt, quote};
use super::lines::Lines;
use super::{Row, tokens};

/// Columns that a line may have.
const COLUMNS_MAX: usize = 64;

/// Reads an Azure trace row by row.
pub struct AzureReader<R> {
    file: Arc<str>,
    lines: Lines<R>,
    fields: Fields,
    columns: Columns,
    /// Where in a line each of the columns stands.
    places: [usize; 3],
    ended: bool,
}

impl<R: BufRead> AzureReader<R> {
    /// A reader of `input`, past its header; `file` is its name in errors.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: no header, or one that lacks a column.
    pub fn new(file: Arc<str>, input: R, columns: Columns) -> Result<Self, TraceError> {
        let mut lines = Lines::new(input);
        let mut fields = Fields::new();
        match header(&mut lines, &mut fields, &columns) {
            Ok(places) => Ok(Self { file, lines, fields, columns, places, ended: false }),
            Err(reason) => Err(TraceError { file, line: Some(lines.number()), reason }),
        }
    }

    fn row(&mut self) -> Result<Option<Row>, Reason> {
        let Some(line) = self.lines.next_line()? else { return Ok(None) };
        self.fields.split(line)?;
        let columns = self.columns.names();
        let [at, input, output] = [0, 1, 2].map(|place| self.fields.get(columns[place], self.places[place]));
        Ok(Some(Row {
            at_ns: instant_ns(at?)?,
            input_tokens: tokens(columns[1], whole(columns[1], input?)?, 1)?,
            output_tokens: tokens(columns[2], whole(columns[2], output?)?, 0)?,
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

fn header<R: BufRead>(
    lines: &mut Lines<R>,
    fields: &mut Fields,
    columns: &Columns,
) -> Result<[usize; 3], Reason> {
    let line = lines.next_line()?.ok_or(Reason::Empty)?;
    fields.split(line)?;
    let mut places = [0; 3];
    for (place, column) in places.iter_mut().zip(columns.names()) {
        *place = fields
            .iter()
            .position(|field| field.trim().eq_ignore_ascii_case(column))
            .ok_or_else(|| Reason::Header { column: column.to_owned(), found: fields.list() })?;
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

    /// The fields, short and printable.
    fn list(&self) -> String {
        let fields: Vec<_> = self.iter().map(|field| excerpt(field.as_bytes())).collect();
        quote(&fields.join(", "))
    }

    fn get(&self, column: &str, place: usize) -> Result<&str, Reason> {
        match self.iter().nth(place).map(str::trim) {
            Some(field) if !field.is_empty() => Ok(field),
            _ => Err(Reason::MissingColumn { column: column.to_owned(), found: self.count }),
        }
    }
}

fn whole(field: &str, text: &str) -> Result<i64, Reason> {
    text.parse().map_err(|_| Reason::Number { field: field.to_owned(), text: excerpt(text.as_bytes()) })
}

/// The latest time in seconds that is believed: it still fits into nanoseconds of 63 bits.
const SECONDS_MAX: f64 = 9e9;

/// `2023-11-16 18:17:03.9799600`, with an offset from UTC (as in the traces of 2024) or without; or
/// a number of seconds.
fn instant_ns(text: &str) -> Result<i64, Reason> {
    let fail = |message: String| Reason::Timestamp { text: excerpt(text.as_bytes()), message };
    if let Ok(seconds) = text.parse::<f64>() {
        // Not a number is not in any range.
        return if (0.0..=SECONDS_MAX).contains(&seconds) {
            Ok((seconds * 1e9) as i64)
        } else {
            Err(fail(format!("outside 0..={SECONDS_MAX} s")))
        };
    }
    let timestamp = match text.parse::<Timestamp>() {
        Ok(timestamp) => timestamp,
        Err(_) => {
            let local: civil::DateTime =
                text.parse().map_err(|e: jiff::Error| fail(quote(&e.to_string())))?;
            TimeZone::UTC.to_timestamp(local).map_err(|e| fail(quote(&e.to_string())))?
        }
    };
    i64::try_from(timestamp.as_nanosecond()).map_err(|_| fail("outside 1677..=2262".to_owned()))
}
