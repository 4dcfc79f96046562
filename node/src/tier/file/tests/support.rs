//! Values, stores over a disk in memory, and what a get comes to.

use kvpool::prefix::BlockHash;

use super::super::slot_file::{SlotFile, slot_bytes};
use super::platter::Disk;
use crate::tier::file::{Admission, FileError, FileSettings};
use crate::tier::{Fingerprint, StoreError, TierKey, TierValue, value_bytes, verify};

/// Packed bytes of the values of most tests: a slot has two sectors of 4 KiB.
pub const PACKED: usize = 5000;

pub fn key(number: u64) -> TierKey {
    let mut random = fastrand::Rng::with_seed(number);
    let hash = BlockHash::new(random.u128(..), random.u64(..));
    TierKey { fingerprint: Fingerprint::from_bytes([3; 16]), hash }
}

/// The block of a key, in a version of it.
pub fn block(number: u64, version: u64, packed: usize) -> Vec<u8> {
    let mut bytes = vec![0; packed];
    fastrand::Rng::with_seed(number << 32 ^ version).fill(&mut bytes);
    bytes
}

pub fn value_of(number: u64, version: u64, packed: usize) -> TierValue {
    let fill = |bytes: &mut [u8]| {
        bytes.copy_from_slice(&block(number, version, packed));
        Ok::<_, ()>(())
    };
    TierValue::new(key(number), &[], packed, fill).unwrap()
}

pub fn value(number: u64, version: u64) -> TierValue {
    value_of(number, version, PACKED)
}

/// Settings with this many slots for values of `PACKED`, which take every value.
pub fn settings(slots: u64) -> FileSettings {
    let slot = slot_bytes(value_bytes(PACKED)) as u64;
    // The smallest size is not checked here.
    let mut settings = FileSettings::new("memory", 4096 + slots * (slot + 64));
    settings.admission = Admission::Always;
    settings
}

pub fn reopened(disk: &Disk, settings: FileSettings) -> Result<SlotFile, FileError> {
    SlotFile::over(settings, Box::new(disk.index()), Box::new(disk.values()))
}

pub fn open(disk: &Disk, settings: FileSettings) -> SlotFile {
    reopened(disk, settings).unwrap()
}

/// What a get of a key came to. Panics at a wrong byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Got {
    Version(u64),
    Miss,
    Damaged,
}

pub fn get(file: &SlotFile, number: u64, versions: u64) -> Got {
    match file.get(&key(number)) {
        Ok(Some(read)) => {
            let packed = verify(&key(number), PACKED, read.as_ref()).expect("a verified value");
            let version = (0..=versions).find(|version| packed == block(number, *version, PACKED));
            Got::Version(version.expect("a wrong byte"))
        }
        Ok(None) => Got::Miss,
        Err(StoreError::Damaged { .. }) => Got::Damaged,
        Err(error) => panic!("{error}"),
    }
}

/// Gets the first version of keys.
pub fn found(file: &SlotFile, numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let is_there = |number: &u64| match get(file, *number, 0) {
        Got::Version(0) => true,
        Got::Miss => false,
        got => panic!("key {number}: {got:?}"),
    };
    numbers.into_iter().filter(is_there).collect()
}
