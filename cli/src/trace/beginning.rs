//! Format detection by the beginning of an input.

use std::io::{self, BufRead};

use serde::de::IgnoredAny;

use super::error::Reason;
use super::lines::{BYTE_ORDER_MARK, LINE_BYTES_MAX};

/// Bytes by which a format is detected if the first line does not suffice.
pub(super) const BEGINNING_BYTES: usize = 1 << 16;

/// Reads the beginning of an input: the first line that is not blank, if that is a whole object or
/// not JSON, and otherwise [`BEGINNING_BYTES`]. A pipe may deliver it in pieces.
pub(super) fn beginning(input: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut beginning = Vec::new();
    loop {
        let piece = input.fill_buf()?;
        let piece = &piece[..piece.len().min(BEGINNING_BYTES)];
        let (is_last, ends_line, length) = (piece.is_empty(), piece.contains(&b'\n'), piece.len());
        beginning.extend_from_slice(piece);
        input.consume(length);
        let text = text_of(&beginning);
        let bytes_max = if text.is_empty() { LINE_BYTES_MAX } else { BEGINNING_BYTES };
        if is_last || beginning.len() >= bytes_max || ends_line && has_whole_line(text) {
            return Ok(beginning);
        }
    }
}

/// Returns whether a text without leading blank lines has its complete first line, and this is not
/// part of a multi-line object.
fn has_whole_line(text: &[u8]) -> bool {
    let end = text.iter().position(|&byte| byte == b'\n');
    end.is_some_and(|end| {
        !text.starts_with(b"{") || serde_json::from_slice::<IgnoredAny>(&text[..end]).is_ok()
    })
}

/// Returns an input from its first non-blank byte, without the byte order mark.
pub(super) fn text_of(beginning: &[u8]) -> &[u8] {
    beginning.strip_prefix(BYTE_ORDER_MARK).unwrap_or(beginning).trim_ascii_start()
}

/// Returns why a file is not UTF-8 text, if its first bytes show it.
pub(super) fn not_text(beginning: &[u8]) -> Option<Reason> {
    const MAGIC: [(&[u8], &str); 7] = [
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh", "bzip2"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"PK\x03\x04", "zip"),
        (b"7z\xbc\xaf\x27\x1c", "7z"),
    ];
    if beginning.starts_with(b"\xff\xfe") || beginning.starts_with(b"\xfe\xff") {
        return Some(Reason::Utf16);
    }
    let by = MAGIC.into_iter().find(|(magic, _)| beginning.starts_with(magic));
    by.map(|(_, by)| Reason::Compressed(by))
}
