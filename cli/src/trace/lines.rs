//! Lines of bounded length: whatever the input, no more than one line is in memory, and no line is longer than
//! [`LINE_BYTES_MAX`].

use std::io::{BufRead, Read};

use super::error::Reason;

/// The longest line that is read, in bytes: a prompt of the greatest length that is believed, with its hash ids,
/// takes less than a tenth of it.
pub const LINE_BYTES_MAX: usize = 4 << 20;

/// What some programs put in front of UTF-8.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The lines of an input, without their ends, in one buffer that is used again.
pub(super) struct Lines<R> {
    input: R,
    number: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub fn new(input: R) -> Self {
        Self { input, number: 0, buffer: Vec::new() }
    }

    /// The number of the line that was read last, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The next line that is not blank; `None` at the end.
    pub fn next_line(&mut self) -> Result<Option<&str>, Reason> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let bounded = &mut Read::by_ref(&mut self.input).take(LINE_BYTES_MAX as u64 + 1);
            if bounded.read_until(b'\n', &mut self.buffer).map_err(Reason::Read)? == 0 {
                return Ok(None);
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(Reason::LineTooLong { max: LINE_BYTES_MAX });
            }
            if self.number == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
                self.buffer.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.buffer.trim_ascii().is_empty() {
                break;
            }
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(line) => Ok(Some(line.trim_end_matches(['\n', '\r']))),
            Err(e) => Err(Reason::NotUtf8 { at: e.valid_up_to() }),
        }
    }
}
