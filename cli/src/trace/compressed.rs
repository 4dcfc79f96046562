//! Traces compressed with gzip or zstd, decompressed while they are read.

use std::io::{BufRead, BufReader, Cursor, Read};

use flate2::bufread::MultiGzDecoder;
use zstd::stream::read::Decoder;

use super::beginning::{beginning, not_text};
use super::error::Reason;

pub(super) fn text<'i, R: BufRead + 'i>(mut input: R) -> Result<Box<dyn BufRead + 'i>, Reason> {
    let beginning = beginning(&mut input).map_err(Reason::Read)?;
    let by = not_text(&beginning);
    let input = Cursor::new(beginning).chain(input);
    Ok(match by {
        Some(Reason::Compressed("gzip")) => Box::new(BufReader::new(MultiGzDecoder::new(input))),
        Some(Reason::Compressed("zstd")) => {
            Box::new(BufReader::new(Decoder::with_buffer(input).map_err(Reason::Read)?))
        }
        _ => Box::new(input),
    })
}
