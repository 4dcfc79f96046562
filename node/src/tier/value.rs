//! Values of a tier: a header and the packed bytes of one block.
//!
//! ```text
//! 0   magic         7 bytes, then the version of the format
//! 8   fingerprint   of the layout, the dtype, the hashing and the namespace
//! 24  hash          128 bits: by which the block is looked up
//! 40  check         64 bits: the second hash of the block
//! 48  length        packed bytes of the block
//! 56  checksum      XXH3-64 of all bytes behind it but the last zeros, seeded with that of bytes 0 to 55
//! 64  origins       up to 12 of 16 bytes: a cache and an era in which the block was computed; then zeros
//! 256 packed bytes  then zeros, up to a multiple of 64
//! ```
//!
//! Numbers are little-endian. All values of one layout have the same size, which prevents
//! fragmentation in the store.

use kvpool::StorageError;
use kvpool::prefix::{BlockHash, ORIGINS_MAX, Origin};
use thiserror::Error;
use twox_hash::XxHash3_64;

use super::key::{Fingerprint, TierKey};

/// Bytes before the block.
pub const HEADER_BYTES: usize = 256;

const ALIGN: usize = 64;

const MAGIC: [u8; 7] = *b"kvblock";

const VERSION: u8 = 2;

const LENGTH: usize = 48;

const CHECKSUM: usize = 56;

const ORIGINS: usize = 64;

const ORIGIN_BYTES: usize = 16;

const _: () = assert!(ORIGINS + ORIGINS_MAX * ORIGIN_BYTES == HEADER_BYTES);

/// A block with its header, ready to be stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TierValue {
    key: TierKey,
    bytes: Vec<u8>,
}

/// Why bytes are not the value of a key.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The size is not that of the layout.
    #[error("the value has {got} bytes, and those of this layout have {want}")]
    Size {
        /// Bytes of the value.
        got: usize,
        /// Bytes of all values of the layout.
        want: usize,
    },
    /// It does not begin with the header of this format.
    #[error("the value has no header of this format")]
    Magic,
    /// It has another version of this format.
    #[error("the value has version {got} of the format; this end reads version {want}")]
    Version {
        /// Version of the value.
        got: u8,
        /// Version of this library.
        want: u8,
    },
    /// This pool computed the block before its cache was cleared.
    #[error("the block was computed here, before the cache was cleared")]
    Stale,
    /// It belongs to another layout, hashing or namespace.
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
    /// Creates a value; `fill` writes the packed bytes of the block. `origins` are those of its
    /// [export](kvpool::transfer::Export::origins), empty for a value that is not from a cache.
    ///
    /// # Errors
    /// That of `fill`.
    ///
    /// # Panics
    /// If there are more than [`ORIGINS_MAX`] origins.
    pub fn new<E>(
        key: TierKey,
        origins: &[Origin],
        packed_bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut bytes = vec![0; value_bytes(packed_bytes)];
        Self::write(&key, origins, packed_bytes, &mut bytes, fill)?;
        Ok(Self { key, bytes })
    }

    /// As [`new`](Self::new), into memory of [`value_bytes`] with zeroed padding.
    ///
    /// # Errors
    /// That of `fill`; the memory then has no header.
    ///
    /// # Panics
    /// If the memory is smaller, or there are more than [`ORIGINS_MAX`] origins.
    pub fn write<E>(
        key: &TierKey,
        origins: &[Origin],
        packed_bytes: usize,
        into: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(origins.len() <= ORIGINS_MAX, "{} origins", origins.len());
        fill(&mut into[HEADER_BYTES..][..packed_bytes])?;
        into[..CHECKSUM].copy_from_slice(&head(key, packed_bytes));
        into[ORIGINS..HEADER_BYTES].fill(0);
        for (origin, into) in origins.iter().zip(into[ORIGINS..HEADER_BYTES].chunks_exact_mut(ORIGIN_BYTES)) {
            into[..8].copy_from_slice(&origin.cache.to_le_bytes());
            into[8..].copy_from_slice(&origin.era.to_le_bytes());
        }
        let sum = checksum(into, packed_bytes);
        into[CHECKSUM..ORIGINS].copy_from_slice(&sum.to_le_bytes());
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

impl AsRef<[u8]> for TierValue {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Returns the header without its checksum.
fn head(key: &TierKey, packed_bytes: usize) -> [u8; CHECKSUM] {
    let mut head = [0; CHECKSUM];
    head[..7].copy_from_slice(&MAGIC);
    head[7] = VERSION;
    head[8..24].copy_from_slice(&key.fingerprint.to_bytes());
    head[24..48].copy_from_slice(&key.hash.to_bytes());
    head[48..].copy_from_slice(&(packed_bytes as u64).to_le_bytes());
    head
}

fn checksum(value: &[u8], packed_bytes: usize) -> u64 {
    let seed = XxHash3_64::oneshot(&value[..CHECKSUM]);
    XxHash3_64::oneshot_with_seed(seed, &value[ORIGINS..HEADER_BYTES + packed_bytes])
}

fn part<const N: usize>(value: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| value[at + byte])
}

/// Returns the packed bytes of a value that was found under a key.
///
/// # Errors
/// [`ValueError`], unless it is the value of this key and has all its bytes.
pub fn verify<'a>(key: &TierKey, packed_bytes: usize, value: &'a [u8]) -> Result<&'a [u8], ValueError> {
    if value.len() > MAGIC.len() && value.starts_with(&MAGIC) && value[MAGIC.len()] != VERSION {
        return Err(ValueError::Version { got: value[MAGIC.len()], want: VERSION });
    }
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
    let length = u64::from_le_bytes(part(value, LENGTH));
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

/// As [`verify`], with the number of packed bytes that the value says itself.
pub(super) fn verify_as_said<'a>(key: &TierKey, value: &'a [u8]) -> Result<&'a [u8], ValueError> {
    if value.len() < HEADER_BYTES {
        return Err(ValueError::Size { got: value.len(), want: HEADER_BYTES });
    }
    let said = u64::from_le_bytes(part(value, LENGTH));
    verify(key, usize::try_from(said).unwrap_or(usize::MAX).min(value.len()), value)
}

/// Returns where the block of a [verified](verify) value was computed.
///
/// # Panics
/// If the value has no header.
pub fn origins_of(value: &[u8]) -> Vec<Origin> {
    let origins = value[ORIGINS..HEADER_BYTES].chunks_exact(ORIGIN_BYTES);
    let origin =
        |at: &[u8]| Origin { cache: u64::from_le_bytes(part(at, 0)), era: u64::from_le_bytes(part(at, 8)) };
    // No cache has the number 0.
    origins.map(origin).take_while(|origin| origin.cache != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: [Origin; 1] = [Origin { cache: 7, era: 1 << 40 }];

    fn key(hash: u128, check: u64) -> TierKey {
        TierKey { fingerprint: Fingerprint::from_bytes([9; 16]), hash: BlockHash::new(hash, check) }
    }

    fn value(key: TierKey, packed: &[u8]) -> TierValue {
        let fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(packed);
            Ok::<_, ()>(())
        };
        TierValue::new(key, &ORIGIN, packed.len(), fill).unwrap()
    }

    #[test]
    fn a_value_is_found_again() {
        for length in [0, 1, 63, 64, 1000] {
            let packed: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            let value = value(key(5, 6), &packed);
            assert_eq!(value.bytes().len() % ALIGN, 0);
            assert_eq!(verify(&key(5, 6), length, value.bytes()), Ok(&packed[..]));
            assert_eq!(origins_of(value.bytes()), ORIGIN);
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
    fn another_version_is_refused_by_name() {
        let mut old = b"kvblock\x01".to_vec();
        old.resize(64 + 128, 0);
        let refused = verify(&key(5, 6), 100, &old).unwrap_err();
        assert_eq!(refused, ValueError::Version { got: 1, want: 2 });
        assert_eq!(refused.to_string(), "the value has version 1 of the format; this end reads version 2");
    }

    #[test]
    fn as_many_origins_as_there_may_be() {
        let all: Vec<_> = (1..=ORIGINS_MAX as u64).map(|cache| Origin { cache, era: cache << 32 }).collect();
        let value = TierValue::new(key(5, 6), &all, 1, |_| Ok::<_, ()>(())).unwrap();
        assert_eq!((verify(&key(5, 6), 1, value.bytes()), origins_of(value.bytes())), (Ok(&[0][..]), all));
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
        // Same size, different length.
        assert!(matches!(verify(&key(5, 6), 101, value.bytes()), Err(ValueError::Size { .. })));
    }
}
