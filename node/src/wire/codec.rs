//! Frames of the control stream, and messages in postcard.
//!
//! ```text
//! bytes    0..4     4      5..8   8..8+length
//! field    length   kind   zero   message
//! ```

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::WireError;

/// Bytes of an encoded [`FrameHead`].
pub const FRAME_HEAD: usize = 8;

/// Contents of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// No contents: the peer is alive.
    Heartbeat = 0,
    /// An encoded message.
    Message = 1,
}

/// Head of a frame of the control stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHead {
    /// What follows.
    pub kind: FrameKind,
    /// Bytes that follow.
    pub length: usize,
}

impl FrameHead {
    /// Encodes the head.
    ///
    /// # Panics
    /// If the length is 4 GiB or more, which no limit permits.
    pub fn encode(&self) -> [u8; FRAME_HEAD] {
        let length = u32::try_from(self.length).expect("a frame is below 4 GiB").to_le_bytes();
        [length[0], length[1], length[2], length[3], self.kind as u8, 0, 0, 0]
    }

    /// Decodes a head, whose length is at most `max`.
    ///
    /// # Errors
    /// [`WireError::TooLarge`], [`WireError::Invalid`].
    pub fn decode(bytes: &[u8; FRAME_HEAD], max: usize) -> Result<Self, WireError> {
        let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let kind = match (bytes[4], length) {
            (0, 0) => FrameKind::Heartbeat,
            (1, _) => FrameKind::Message,
            (got, _) => return Err(WireError::Invalid { what: "the kind of a frame", got: got.into() }),
        };
        if bytes[5..] != [0; 3] {
            return Err(WireError::Invalid { what: "a spare byte of a frame", got: bytes[5].into() });
        }
        if length as usize > max {
            return Err(WireError::TooLarge { what: "a message", got: length.into(), max: max as u64 });
        }
        Ok(Self { kind, length: length as usize })
    }
}

/// Encodes a message of at most `max` bytes.
///
/// # Errors
/// [`WireError::TooLarge`]; [`WireError::Malformed`] for a type that postcard cannot encode.
pub fn encode<M: Serialize>(message: &M, max: usize) -> Result<Vec<u8>, WireError> {
    let bytes = postcard::to_allocvec(message).map_err(|error| WireError::Malformed {
        what: std::any::type_name::<M>(),
        reason: error.to_string(),
    })?;
    if bytes.len() > max {
        return Err(WireError::TooLarge { what: "a message", got: bytes.len() as u64, max: max as u64 });
    }
    Ok(bytes)
}

/// Decodes a message that uses all of `bytes`.
///
/// Memory of a collection grows as its elements arrive, not by its claimed length.
///
/// # Errors
/// [`WireError::Malformed`], also if bytes are left.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, WireError> {
    decode_of(bytes, false)
}

/// As [`decode`]; with `may_append`, skips fields that a later release has appended.
///
/// # Errors
/// [`WireError::Malformed`].
pub fn decode_of<M: DeserializeOwned>(bytes: &[u8], may_append: bool) -> Result<M, WireError> {
    let malformed = |reason: String| WireError::Malformed { what: std::any::type_name::<M>(), reason };
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|error| malformed(error.to_string()))?;
    if !rest.is_empty() && !may_append {
        return Err(malformed(format!("{} of {} bytes are left over", rest.len(), bytes.len())));
    }
    Ok(message)
}
