//! The words of the format: the superblock, and the record of a slot. Pure functions.

use kvpool::prefix::BlockHash;
use twox_hash::XxHash3_64;

use super::super::key::{Fingerprint, TierKey};

/// Bytes of a superblock, of a record, and of the header of a slot.
pub(super) const RECORD_BYTES: usize = 64;

/// Offset of the first record in the index.
pub(super) const RECORDS: u64 = 4096;

/// Version of the format.
pub(super) const VERSION: u8 = 1;

/// Generations above this are not written in any time: a record that has one is damaged.
const GENERATION_MAX: u64 = 1 << 63;

const MAGIC: [u8; 7] = *b"kvslots";

const CHECKSUM: usize = 56;

type Bytes = [u8; RECORD_BYTES];

/// The first bytes of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Superblock {
    /// Random; seeds all checksums, so that records of a former format are invalid.
    pub(super) store: u64,
    /// Bytes of a slot, a multiple of the alignment.
    pub(super) slot_bytes: u64,
}

/// Why bytes are not a superblock of this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoSuperblock {
    /// All zeros: the directory is new, or its format was interrupted.
    Blank,
    /// Not a file of this store.
    Foreign,
    /// Another version.
    Version(u8),
    /// The checksum does not match.
    Damaged,
}

impl Superblock {
    pub(super) fn encode(self) -> Bytes {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..7].copy_from_slice(&MAGIC);
        bytes[7] = VERSION;
        bytes[8..16].copy_from_slice(&self.store.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.slot_bytes.to_le_bytes());
        seal(bytes, 0)
    }

    pub(super) fn decode(bytes: &Bytes) -> Result<Self, NoSuperblock> {
        if *bytes == [0; RECORD_BYTES] {
            return Err(NoSuperblock::Blank);
        }
        // A torn one may end within the magic number.
        let written = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let is_torn = written <= MAGIC.len() && MAGIC.starts_with(&bytes[..written]);
        if is_torn {
            return Err(NoSuperblock::Damaged);
        }
        if bytes[..7] != MAGIC {
            return Err(NoSuperblock::Foreign);
        }
        if bytes[7] != VERSION {
            return Err(NoSuperblock::Version(bytes[7]));
        }
        let slot_bytes = number(bytes, 16);
        if !is_sealed(bytes, 0) || slot_bytes == 0 {
            return Err(NoSuperblock::Damaged);
        }
        Ok(Self { store: number(bytes, 8), slot_bytes })
    }

    /// Returns the offset of a slot in the file of values.
    pub(super) fn slot(self, slot: u32) -> u64 {
        u64::from(slot) * self.slot_bytes
    }

    /// Returns the offset of the record of a slot in the index.
    pub(super) fn record(slot: u32) -> u64 {
        RECORDS + u64::from(slot) * RECORD_BYTES as u64
    }

    /// Returns the checksums' seed in a slot: a record that was written to another slot is invalid.
    fn seed(self, slot: u32) -> u64 {
        self.store ^ (u64::from(slot) + 1)
    }
}

/// What a slot contains. It is written twice: into the index, and before the value in the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) key: TierKey,
    /// Number of the put, from 1; of two records of a key, the greater one is valid.
    pub(super) generation: u64,
    /// Bytes of the value.
    pub(super) length: u32,
}

impl Record {
    pub(super) fn encode(&self, of: Superblock, slot: u32) -> Bytes {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..16].copy_from_slice(&self.key.fingerprint.to_bytes());
        bytes[16..40].copy_from_slice(&self.key.hash.to_bytes());
        bytes[40..48].copy_from_slice(&self.generation.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.length.to_le_bytes());
        seal(bytes, of.seed(slot))
    }

    /// Returns the record in these bytes; `None` if they have none.
    pub(super) fn decode(bytes: &Bytes, of: Superblock, slot: u32) -> Option<Self> {
        if !is_sealed(bytes, of.seed(slot)) {
            return None;
        }
        let fingerprint = Fingerprint::from_bytes(*bytes.first_chunk()?);
        let hash = BlockHash::from_bytes(*bytes[16..].first_chunk()?);
        let length = u32::from_le_bytes(*bytes[48..].first_chunk()?);
        let generation = number(bytes, 40);
        (generation <= GENERATION_MAX).then_some(Self {
            key: TierKey { fingerprint, hash },
            generation,
            length,
        })
    }
}

fn number(bytes: &Bytes, at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

fn checksum(bytes: &Bytes, seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, &bytes[..CHECKSUM])
}

fn seal(mut bytes: Bytes, seed: u64) -> Bytes {
    let sum = checksum(&bytes, seed);
    bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn is_sealed(bytes: &Bytes, seed: u64) -> bool {
    number(bytes, CHECKSUM) == checksum(bytes, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: Superblock = Superblock { store: 0x0123_4567_89AB_CDEF, slot_bytes: 8192 };

    fn record() -> Record {
        let fingerprint = Fingerprint::from_bytes([7; 16]);
        let key = TierKey { fingerprint, hash: BlockHash::new(u128::MAX / 3, 5) };
        Record { key, generation: 1 << 40, length: 5000 }
    }

    #[test]
    fn words_are_found_again_and_every_bit_counts() {
        let (superblock, slot) = (OF.encode(), record().encode(OF, 3));
        assert_eq!(Superblock::decode(&superblock), Ok(OF));
        assert_eq!(Record::decode(&slot, OF, 3), Some(record()));
        for bit in 0..RECORD_BYTES * 8 {
            let flip = |mut bytes: Bytes| {
                bytes[bit / 8] ^= 1 << (bit % 8);
                bytes
            };
            assert!(Superblock::decode(&flip(superblock)).is_err(), "bit {bit}");
            assert_eq!(Record::decode(&flip(slot), OF, 3), None, "bit {bit}");
        }
    }

    #[test]
    fn a_record_is_valid_in_one_slot_of_one_store() {
        let bytes = record().encode(OF, 3);
        assert_eq!(Record::decode(&bytes, OF, 4), None);
        assert_eq!(Record::decode(&bytes, Superblock { store: 1, ..OF }, 3), None);
        assert_eq!(Record::decode(&[0; RECORD_BYTES], OF, 3), None, "a free slot");
        let last = Record { generation: u64::MAX, ..record() };
        assert_eq!(Record::decode(&last.encode(OF, 3), OF, 3), None, "no generation may follow");
        // A slot of zeros is free, whatever the seed.
        for slot in 0..1000 {
            assert_eq!(Record::decode(&[0; RECORD_BYTES], Superblock { store: 0, ..OF }, slot), None);
        }
    }

    #[test]
    fn what_is_no_superblock_is_told_apart() {
        let mut other = OF.encode();
        other[7] = VERSION + 1;
        assert_eq!(Superblock::decode(&other), Err(NoSuperblock::Version(VERSION + 1)));
        assert_eq!(Superblock::decode(&[0; RECORD_BYTES]), Err(NoSuperblock::Blank));
        assert_eq!(Superblock::decode(&[b'x'; RECORD_BYTES]), Err(NoSuperblock::Foreign));
        for end in 1..RECORD_BYTES - 1 {
            let torn = std::array::from_fn(|at| if at < end { OF.encode()[at] } else { 0 });
            assert_eq!(Superblock::decode(&torn), Err(NoSuperblock::Damaged), "{end} bytes");
        }
    }
}
