//! Azure's traces, and others like them: CSV with a header.

use std::io::{self, BufRead, Read};
use std::str::FromStr;
use std::time::Duration;

use csv::{ReaderBuilder, StringRecord, Trim};
use jiff::{Timestamp, civil, tz::TimeZone};

use super::error::{Reason, excerpt, quote};
use super::lines::{LINE_BYTES_MAX, Lines};
use super::{Request, Row, tokens};

const COLUMNS_MAX: usize = 64;

/// The columns that are read, by their names in the header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Columns {
    /// The arrival of the request.
    pub arrival: String,
    /// Tokens of the prompt.
    pub input: String,
    /// Tokens of the answer.
    pub output: String,
}

impl Default for Columns {
    fn default() -> Self {
        let [arrival, input, output] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"].map(str::to_owned);
        Self { arrival, input, output }
    }
}

impl Columns {
    pub(super) fn names(&self) -> [&str; 3] {
        [&self.arrival, &self.input, &self.output]
    }
}

impl FromStr for Columns {
    type Err = String;

    /// Parses `arrival=NAME,input=NAME,output=NAME`. Omitted fields keep their default names.
    fn from_str(text: &str) -> Result<Self, String> {
        let (mut columns, mut named) = (Self::default(), Vec::new());
        for item in text.split(',') {
            let parts = item.split_once('=').map(|(field, name)| (field.trim(), name.trim()));
            let parts = parts.filter(|(_, name)| !name.is_empty());
            let (field, name) = parts.ok_or_else(|| format!("\"{item}\" is not written as field=NAME"))?;
            let column = match field {
                "arrival" => &mut columns.arrival,
                "input" => &mut columns.input,
                "output" => &mut columns.output,
                _ => {
                    return Err(format!(
                        "no field is called \"{field}\"; there are arrival, input and output"
                    ));
                }
            };
            if named.contains(&field) {
                return Err(format!("{field} is named twice"));
            }
            name.clone_into(column);
            named.push(field);
        }
        Ok(columns)
    }
}

/// The lines of a file as input of the CSV reader. A read ends at the end of a line, so the reader
/// is never ahead of its record, and the line number is the record's.
struct Records<'l, R> {
    lines: &'l mut Lines<R>,
    at: usize,
    bytes: usize,
}

impl<R: BufRead> Read for Records<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.lines.line().len() {
            self.at = 0;
            self.bytes += match self.lines.next_line().map_err(io::Error::other)? {
                Some(line) => line.len(),
                None => return Ok(0),
            };
            if self.bytes > LINE_BYTES_MAX {
                return Err(io::Error::other(Reason::LineTooLong(LINE_BYTES_MAX)));
            }
        }
        let read = (&self.lines.line()[self.at..]).read(out)?;
        self.at += read;
        Ok(read)
    }
}

pub(super) fn read<R: BufRead>(
    lines: &mut Lines<R>,
    columns: &Columns,
    max: usize,
) -> Result<Vec<Row>, Reason> {
    let records = Records { lines, at: 0, bytes: 0 };
    let mut reader =
        ReaderBuilder::new().has_headers(false).flexible(true).trim(Trim::All).from_reader(records);
    let mut record = StringRecord::new();
    let mut next = move || -> Result<Option<StringRecord>, Reason> {
        reader.get_mut().bytes = 0;
        match reader.read_record(&mut record).map_err(reason)? {
            true if record.len() > COLUMNS_MAX => Err(Reason::TooManyColumns(COLUMNS_MAX)),
            is_there => Ok(is_there.then(|| record.clone())),
        }
    };
    let header = next()?.ok_or(Reason::Empty)?;
    let names = columns.names();
    let mut places = [0; 3];
    for (place, name) in places.iter_mut().zip(names) {
        let mut named = header.iter().enumerate().filter(|(_, field)| field.eq_ignore_ascii_case(name));
        let found = named.next().map(|(place, _)| place);
        if named.next().is_some() {
            return Err(Reason::RepeatedColumn(name.to_owned()));
        }
        *place = found.ok_or_else(|| {
            let fields: Vec<_> = header.iter().map(|field| excerpt(field.as_bytes())).collect();
            Reason::Header { column: name.to_owned(), found: quote(&fields.join(", ")) }
        })?;
    }
    let (mut rows, mut is_number) = (Vec::new(), None);
    while rows.len() < max
        && let Some(record) = next()?
    {
        let field = |place: usize| match record.get(places[place]) {
            Some(field) if !field.is_empty() => Ok(field),
            _ => Err(Reason::MissingColumn { column: names[place].to_owned(), found: record.len() }),
        };
        let count = |place, min| {
            let (name, text) = (names[place], field(place)?);
            let number = text
                .parse()
                .map_err(|_| Reason::Number { field: name.to_owned(), text: excerpt(text.as_bytes()) })?;
            tokens(name, number, min)
        };
        let arrival = field(0)?;
        let at_ns = instant_ns(arrival)?;
        // A number counts from the start of the trace, a date from 1970.
        let found = seconds(arrival).is_some();
        if *is_number.get_or_insert(found) != found {
            let message =
                if found { "a number of seconds after dates" } else { "a date after numbers of seconds" };
            return Err(fault(arrival, message.to_owned()));
        }
        rows.push((at_ns, Request::new(Duration::ZERO, count(1, 1)?, count(2, 0)?)));
    }
    Ok(rows)
}

/// Returns the reason of an error of the CSV reader, which is an error of its input.
fn reason(error: csv::Error) -> Reason {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error.downcast().unwrap_or_else(Reason::Read),
        kind => Reason::Read(io::Error::other(format!("{kind:?}"))),
    }
}

/// The latest time in seconds that fits into 63 bits of nanoseconds.
const SECONDS_MAX: f64 = 9e9;

fn seconds(text: &str) -> Option<f64> {
    text.parse().ok()
}

fn fault(text: &str, message: String) -> Reason {
    Reason::Timestamp { field: "timestamp", text: excerpt(text.as_bytes()), message }
}

/// Parses `2023-11-16 18:17:03.9799600`, with an offset from UTC (as in the traces of 2024) or
/// without; or a number of seconds.
fn instant_ns(text: &str) -> Result<i64, Reason> {
    let fail = |message| fault(text, message);
    if let Some(seconds) = seconds(text) {
        // Excludes NaN.
        return if (0.0..=SECONDS_MAX).contains(&seconds) {
            Ok((seconds * 1e9) as i64)
        } else {
            Err(fail(format!("outside 0..={SECONDS_MAX:e} s")))
        };
    }
    let local = || text.parse::<civil::DateTime>().and_then(|local| TimeZone::UTC.to_timestamp(local));
    let timestamp =
        text.parse::<Timestamp>().or_else(|_| local()).map_err(|e| fail(quote(&e.to_string())))?;
    i64::try_from(timestamp.as_nanosecond()).map_err(|_| fail("outside 1677..=2262".to_owned()))
}
