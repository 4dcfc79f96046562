//! Heads of data items, and acknowledgements.
//!
//! ```text
//! bytes    0      1      2..4   4..8    8..16   16..24   24..28   28..32
//! item     1      form   zero   bytes   item    tag      start    frames
//! ack      2      status zero   zero    item    zero     zero     zero
//! ```
//!
//! The bytes of the item's frames follow an item's head. Both directions of a data stream carry
//! both kinds; acknowledgements arrive in the order of the items.

use kvpool::transport::Tag;
use kvpool::{FrameId, Run};

use super::WireError;

/// Bytes of an encoded [`StreamHead`].
pub const ITEM_HEAD: usize = 32;

/// Order of an item's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Form {
    /// Frame by frame, each as [`Storage::pack`](kvpool::storage::Storage::pack) writes it.
    Packed = 0,
    /// Plane by plane, each with the tiles of all frames: few pieces if planes are contiguous.
    Planes = 1,
}

/// Head of an item: a run of frames whose bytes follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ItemHead {
    /// Number of the item, by which it is acknowledged.
    pub item: u64,
    /// Grant of the receiver.
    pub tag: Tag,
    /// Frames of the receiver.
    pub run: Run,
    /// Order of the bytes.
    pub form: Form,
    /// Bytes that follow.
    pub bytes: u32,
}

/// Result of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ItemStatus {
    /// All bytes are in the receiver's frames.
    Written = 0,
    /// The peer has no such grant, or it was revoked.
    UnknownGrant = 1,
    /// The run is outside of the grant.
    OutsideGrant = 2,
    /// Frames of the receiver have another size.
    OtherSize = 3,
    /// Another item with frames of the run is being received.
    Overlap = 4,
    /// The receiver's storage failed.
    Storage = 5,
}

/// Acknowledgement of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// Number of the item.
    pub item: u64,
    /// Its result.
    pub status: ItemStatus,
}

/// Head of an element of a data stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamHead {
    /// An item; its bytes follow.
    Item(ItemHead),
    /// An acknowledgement.
    Ack(Ack),
}

impl StreamHead {
    /// Encodes the head.
    pub fn encode(&self) -> [u8; ITEM_HEAD] {
        let mut bytes = [0; ITEM_HEAD];
        match self {
            Self::Item(head) => {
                bytes[0] = 1;
                bytes[1] = head.form as u8;
                bytes[4..8].copy_from_slice(&head.bytes.to_le_bytes());
                bytes[8..16].copy_from_slice(&head.item.to_le_bytes());
                bytes[16..24].copy_from_slice(&head.tag.0.to_le_bytes());
                bytes[24..28].copy_from_slice(&head.run.start.0.to_le_bytes());
                bytes[28..32].copy_from_slice(&head.run.len.to_le_bytes());
            }
            Self::Ack(ack) => {
                bytes[0] = 2;
                bytes[1] = ack.status as u8;
                bytes[8..16].copy_from_slice(&ack.item.to_le_bytes());
            }
        }
        bytes
    }

    /// Decodes a head. An item's run has at least one frame, and ends within 32 bits.
    ///
    /// # Errors
    /// [`WireError::Invalid`].
    pub fn decode(bytes: &[u8; ITEM_HEAD]) -> Result<Self, WireError> {
        let four = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let eight = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let invalid = |what, got: u64| Err(WireError::Invalid { what, got });
        if bytes[2..4] != [0; 2] {
            return invalid("a spare byte of an item", bytes[2].into());
        }
        match bytes[0] {
            1 => {
                let form = match bytes[1] {
                    0 => Form::Packed,
                    1 => Form::Planes,
                    got => return invalid("the form of an item", got.into()),
                };
                let run = Run { start: FrameId(four(24)), len: four(28) };
                if run.len == 0 || run.start.0.checked_add(run.len).is_none() {
                    return invalid("the number of frames of an item", run.len.into());
                }
                Ok(Self::Item(ItemHead { item: eight(8), tag: Tag(eight(16)), run, form, bytes: four(4) }))
            }
            2 => {
                if four(4) != 0 || bytes[16..].iter().any(|&byte| byte != 0) {
                    return invalid("a spare field of an acknowledgement", four(4).into());
                }
                let status = ItemStatus::decode(bytes[1])?;
                Ok(Self::Ack(Ack { item: eight(8), status }))
            }
            got => invalid("the kind of an item", got.into()),
        }
    }
}

impl ItemStatus {
    fn decode(byte: u8) -> Result<Self, WireError> {
        const ALL: [ItemStatus; 6] = [
            ItemStatus::Written,
            ItemStatus::UnknownGrant,
            ItemStatus::OutsideGrant,
            ItemStatus::OtherSize,
            ItemStatus::Overlap,
            ItemStatus::Storage,
        ];
        let known = ALL.into_iter().find(|&status| status as u8 == byte);
        known.ok_or(WireError::Invalid { what: "the status of an item", got: byte.into() })
    }
}
