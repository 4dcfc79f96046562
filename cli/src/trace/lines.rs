//! Lines of bounded length: at most one line of the input is in memory, of at most
//! [`LINE_BYTES_MAX`] bytes.

use std::io::{BufRead, Read};

use super::error::Reason;

/// Maximum length of a line in bytes: more than ten times that of the longest prompt with its hash
/// ids.
pub const LINE_BYTES_MAX: usize = 4 << 20;

pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

pub(super) struct Lines<R> {
    input: R,
    number: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub fn new(input: R) -> Self {
        Self { input, number: 0, buffer: Vec::new() }
    }

    /// Returns the number of the current line, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the current line with its end.
    pub fn line(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads the next non-blank line; `None` at the end.
    pub fn next_line(&mut self) -> Result<Option<&str>, Reason> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let bounded = &mut Read::by_ref(&mut self.input).take(LINE_BYTES_MAX as u64 + 1);
            if bounded.read_until(b'\n', &mut self.buffer).map_err(Reason::Read)? == 0 {
                return Ok(None);
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(Reason::LineTooLong(LINE_BYTES_MAX));
            }
            if self.number == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
                self.buffer.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.buffer.trim_ascii().is_empty() {
                return match std::str::from_utf8(&self.buffer) {
                    Ok(line) => Ok(Some(line)),
                    Err(e) => Err(Reason::NotUtf8(e.valid_up_to())),
                };
            }
        }
    }
}
