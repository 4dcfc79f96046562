//! Values of a tier: a header and the packed bytes of one block.
//!
//! ```text
//! 0   magic         7 bytes, then the version of the format
//! 8   fingerprint   of the layout, the dtype, the hashing and the namespace
//! 24  hash          128 bits: by which the block is looked up
//! 40  check         64 bits: the second hash of the block
//! 48  length        packed bytes of the block
//! 56  checksum      XXH3-64 of the packed bytes, seeded with that of bytes 0 to 55
//! 64  packed bytes  then zeros, up to a multiple of 64
//! ```
//!
//! Numbers are little-endian. All values of one layout have the same size, so that the allocator of a
//! store cannot fragment.

use kvpool::StorageError;
use kvpool::prefix::BlockHash;
use thiserror::Error;
use twox_hash::XxHash3_64;

use super::key::{Fingerprint, TierKey};

/// Bytes before the block.
pub const HEADER_BYTES: usize = 64;

/// The sizes of values are multiples of this.
const ALIGN: usize = 64;

const MAGIC: [u8; 8] = *b"kvblock\x01";

const CHECKSUM: usize = 56;

/// A block with its header, ready to be stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TierValue {
    key: TierKey,
    bytes: Vec<u8>,
}

/// Reason why bytes are not the value of a key.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value has another size than those of the layout.
    #[error("the value has {got} bytes, and those of this layout have {want}")]
    Size {
        /// Bytes of the value.
        got: usize,
        /// Bytes of every value of the layout.
        want: usize,
    },
    /// It does not begin with the header of this format.
    #[error("the value has no header of this format")]
    Magic,
    /// It belongs to pools of another layout, hashing or namespace.
    #[error("the value is of fingerprint {got}")]
    Fingerprint {
        /// Fingerprint in the header.
        got: Fingerprint,
    },
    /// It is another block.
    #[error("the value is block {got}")]
    OtherBlock {
        /// Hash in the header.
        got: BlockHash,
    },
    /// The bytes changed since they were stored.
    #[error("the bytes do not have the checksum of their header")]
    Checksum,
    /// The bytes could not be written into their frame.
    #[error("{0}")]
    Storage(StorageError),
}

/// Returns the size of the values of blocks with this many packed bytes.
pub const fn value_bytes(packed_bytes: usize) -> usize {
    (HEADER_BYTES + packed_bytes).next_multiple_of(ALIGN)
}

impl TierValue {
    /// Creates a value; `fill` writes the packed bytes of the block.
    ///
    /// # Errors
    ///
    /// That of `fill`.
    pub fn new<E>(
        key: TierKey,
        packed_bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut bytes = vec![0; value_bytes(packed_bytes)];
        Self::write(&key, packed_bytes, &mut bytes, fill)?;
        Ok(Self { key, bytes })
    }

    /// Writes header and block into memory of [`value_bytes`], whose padding the caller has zeroed;
    /// `fill` writes the packed bytes of the block.
    ///
    /// # Errors
    ///
    /// That of `fill`; the memory then has no header.
    ///
    /// # Panics
    ///
    /// If the memory is smaller.
    pub fn write<E>(
        key: &TierKey,
        packed_bytes: usize,
        into: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        fill(&mut into[HEADER_BYTES..][..packed_bytes])?;
        into[..CHECKSUM].copy_from_slice(&head(key, packed_bytes));
        let sum = checksum(into, packed_bytes);
        into[CHECKSUM..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        Ok(())
    }

    /// Returns the key.
    pub fn key(&self) -> &TierKey {
        &self.key
    }

    /// Returns header, block and padding.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Returns the header without its checksum.
fn head(key: &TierKey, packed_bytes: usize) -> [u8; CHECKSUM] {
    let mut head = [0; CHECKSUM];
    head[..8].copy_from_slice(&MAGIC);
    head[8..24].copy_from_slice(&key.fingerprint.to_bytes());
    head[24..48].copy_from_slice(&key.hash.to_bytes());
    head[48..].copy_from_slice(&(packed_bytes as u64).to_le_bytes());
    head
}

fn checksum(value: &[u8], packed_bytes: usize) -> u64 {
    let seed = XxHash3_64::oneshot(&value[..CHECKSUM]);
    XxHash3_64::oneshot_with_seed(seed, &value[HEADER_BYTES..][..packed_bytes])
}

fn part<const N: usize>(value: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| value[at + byte])
}

/// Returns the packed bytes of a value that was found under a key.
///
/// # Errors
///
/// [`ValueError`], unless it is the value of this key and has all its bytes.
pub fn verify<'a>(key: &TierKey, packed_bytes: usize, value: &'a [u8]) -> Result<&'a [u8], ValueError> {
    let want = value_bytes(packed_bytes);
    if value.len() != want {
        return Err(ValueError::Size { got: value.len(), want });
    }
    if !value.starts_with(&MAGIC) {
        return Err(ValueError::Magic);
    }
    let got = Fingerprint::from_bytes(part(value, 8));
    if got != key.fingerprint {
        return Err(ValueError::Fingerprint { got });
    }
    let got = BlockHash::from_bytes(part(value, 24));
    if got != key.hash {
        return Err(ValueError::OtherBlock { got });
    }
    let length = u64::from_le_bytes(part(value, 48));
    if length != packed_bytes as u64 {
        return Err(ValueError::Size {
            got: usize::try_from(length).unwrap_or(usize::MAX),
            want: packed_bytes,
        });
    }
    if u64::from_le_bytes(part(value, CHECKSUM)) != checksum(value, packed_bytes) {
        return Err(ValueError::Checksum);
    }
    Ok(&value[HEADER_BYTES..][..packed_bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u128, check: u64) -> TierKey {
        TierKey { fingerprint: Fingerprint::from_bytes([9; 16]), hash: BlockHash::new(hash, check) }
    }

    fn value(key: TierKey, packed: &[u8]) -> TierValue {
        let fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(packed);
            Ok::<_, ()>(())
        };
        TierValue::new(key, packed.len(), fill).unwrap()
    }

    #[test]
    fn a_value_is_found_again() {
        for length in [0, 1, 63, 64, 1000] {
            let packed: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            let value = value(key(5, 6), &packed);
            assert_eq!(value.bytes().len() % ALIGN, 0);
            assert_eq!(verify(&key(5, 6), length, value.bytes()), Ok(&packed[..]));
        }
    }

    #[test]
    fn every_bit_counts_up_to_the_padding() {
        let packed = [3; 100];
        let value = value(key(5, 6), &packed);
        for bit in 0..(HEADER_BYTES + packed.len()) * 8 {
            let mut bytes = value.bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(&key(5, 6), 100, &bytes).is_err(), "bit {bit}");
        }
        for bytes in 0..value.bytes().len() {
            let short = &value.bytes()[..bytes];
            assert!(matches!(verify(&key(5, 6), 100, short), Err(ValueError::Size { .. })), "{bytes} bytes");
        }
        let long = [value.bytes(), &[0]].concat();
        assert!(matches!(verify(&key(5, 6), 100, &long), Err(ValueError::Size { .. })));
    }

    #[test]
    fn another_block_is_told_apart_by_both_hashes() {
        let value = value(key(5, 6), &[3; 100]);
        for other in [key(5, 7), key(4, 6)] {
            let got = BlockHash::new(5, 6);
            assert_eq!(verify(&other, 100, value.bytes()), Err(ValueError::OtherBlock { got }));
        }
        let other = TierKey { fingerprint: Fingerprint::from_bytes([8; 16]), ..key(5, 6) };
        assert!(matches!(verify(&other, 100, value.bytes()), Err(ValueError::Fingerprint { .. })));
        // Of the same size, and another length.
        assert!(matches!(verify(&key(5, 6), 101, value.bytes()), Err(ValueError::Size { .. })));
    }
}
