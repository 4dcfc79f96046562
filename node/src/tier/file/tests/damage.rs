use std::time::{Duration, Instant};

use super::super::record::{RECORD_BYTES, RECORDS};
use super::super::slot_file::{SlotFile, slot_bytes};
use super::platter::{Disk, Fault};
use super::support::{Got, PACKED, found, get, key, open, reopened, settings, value};
use crate::tier::file::{FileError, FileStore};
use crate::tier::{BreakerState, Outcome, SharedTier, StoreError, TierSettings, value_bytes};

fn slot() -> usize {
    slot_bytes(value_bytes(PACKED))
}

fn stored(numbers: std::ops::Range<u64>) -> (Disk, SlotFile) {
    let disk = Disk::new(0);
    let file = open(&disk, settings(8));
    numbers.for_each(|number| file.put(&value(number, 0)).unwrap());
    (disk, file)
}

/// A flipped bit anywhere in a slot up to the padding is a miss, and the slot is free.
#[test]
fn a_flipped_bit_in_a_slot() {
    let packed_end = RECORD_BYTES + 256 + PACKED;
    for byte in (0..packed_end).step_by(211).chain([0, 63, 64, 128, packed_end - 1]) {
        let (disk, file) = stored(0..3);
        disk.change(false, |bytes| bytes[slot() + byte] ^= 1 << (byte % 8));
        assert_eq!(get(&file, 1, 0), Got::Damaged, "byte {byte}");
        assert_eq!(found(&file, 0..3), [0, 2]);
        let counters = file.counters();
        assert_eq!((counters.used_slots, counters.damaged_slots), (2, 1));
        file.put(&value(1, 0)).unwrap();
        assert_eq!(found(&file, 0..3), [0, 1, 2]);
        drop(file);
        assert_eq!(found(&open(&disk, settings(8)), 0..3), [0, 1, 2]);
    }
}

/// A flipped bit in a record frees its slot at the next start, and touches no other.
#[test]
fn a_flipped_bit_in_a_record() {
    for bit in (0..RECORD_BYTES * 8).step_by(5) {
        let (disk, file) = stored(0..3);
        drop(file);
        disk.change(true, |bytes| bytes[RECORDS as usize + RECORD_BYTES + bit / 8] ^= 1 << (bit % 8));
        let file = open(&disk, settings(8));
        assert_eq!(found(&file, 0..3), [0, 2], "bit {bit}");
        assert_eq!(file.counters().damaged_slots, 1);
        drop(file);
        let file = open(&disk, settings(8));
        assert_eq!(file.counters().damaged_slots, 0, "counted once");
        file.put(&value(1, 0)).unwrap();
        assert_eq!(found(&file, 0..3), [0, 1, 2]);
    }
}

/// Slots of two values that were exchanged, with their records or without, are misses.
#[test]
fn exchanged_slots() {
    for with_records in [false, true] {
        let (disk, file) = stored(0..3);
        drop(file);
        disk.change(false, |bytes| {
            let (a, b) = bytes.split_at_mut(slot());
            a.swap_with_slice(&mut b[..slot()]);
        });
        if with_records {
            disk.change(true, |bytes| {
                let (a, b) = bytes[RECORDS as usize..].split_at_mut(RECORD_BYTES);
                a.swap_with_slice(&mut b[..RECORD_BYTES]);
            });
        }
        let file = open(&disk, settings(8));
        for number in [0, 1] {
            assert_ne!(get(&file, number, 0), Got::Version(0));
        }
        assert_eq!(found(&file, 0..3), [2]);
    }
}

/// Values that were cut off are misses, and a cut index forgets their keys.
#[test]
fn cut_files() {
    let (disk, file) = stored(0..4);
    disk.change(false, |bytes| bytes.truncate(2 * slot() + 100));
    assert_eq!([0, 1, 2, 3].map(|number| get(&file, number, 0)), {
        [Got::Version(0), Got::Version(0), Got::Damaged, Got::Damaged]
    });
    drop(file);
    disk.change(true, |bytes| bytes.truncate(RECORDS as usize + RECORD_BYTES));
    let file = open(&disk, settings(8));
    assert_eq!(found(&file, 0..4), [0]);
    file.put(&value(3, 0)).unwrap();
    assert_eq!(found(&file, 0..4), [0, 3]);
}

#[test]
fn another_version_and_another_file_are_refused_and_left_as_they_are() {
    for (byte, is_version) in [(7, true), (0, false)] {
        let (disk, file) = stored(0..2);
        drop(file);
        disk.change(true, |bytes| bytes[byte] += 1);
        let error = reopened(&disk, settings(8)).err().expect("a refusal");
        match &error {
            FileError::Format { got: 2, want: 1, .. } => assert!(is_version),
            FileError::Foreign { .. } => assert!(!is_version),
            other => panic!("{other}"),
        }
        assert!(error.to_string().contains("delete the files"), "{error}");
        disk.change(true, |bytes| bytes[byte] -= 1);
        assert_eq!(found(&open(&disk, settings(8)), 0..2), [0, 1]);
    }
    let disk = Disk::new(0);
    disk.change(true, |bytes| bytes.extend(b"a short text"));
    assert!(matches!(reopened(&disk, settings(8)), Err(FileError::Foreign { .. })));
    // Values without an index.
    for index in [0, 8192] {
        let disk = Disk::new(0);
        disk.change(true, |bytes| bytes.resize(index, 0));
        disk.change(false, |bytes| bytes.extend(b"a database"));
        assert!(matches!(reopened(&disk, settings(8)), Err(FileError::Foreign { .. })));
        disk.change(false, |bytes| assert_eq!(bytes, b"a database"));
    }
}

/// A damaged superblock is an empty store, in which no former record is valid.
#[test]
fn a_damaged_superblock() {
    let (disk, file) = stored(0..4);
    drop(file);
    disk.change(true, |bytes| bytes[12] ^= 1);
    let file = open(&disk, settings(8));
    assert!(found(&file, 0..4).is_empty());
    assert_eq!(file.counters().damaged_slots, 1);
    file.put(&value(2, 0)).unwrap();
    drop(file);
    assert_eq!(found(&open(&disk, settings(8)), 0..4), [2]);
}

/// On a full disk, values replace others; without any, the error says so. It recovers.
#[test]
fn a_full_disk() {
    let (disk, file) = stored(0..3);
    disk.set_fault(Fault::Full(disk.pages()));
    for number in 3..6 {
        file.put(&value(number, 0)).unwrap();
        assert_eq!(get(&file, number, 0), Got::Version(0));
    }
    let counters = file.counters();
    assert!(counters.is_disk_full);
    assert_eq!((counters.used_slots, counters.evictions), (3, 3));
    drop(file);
    assert_eq!(found(&open(&disk, settings(8)), 0..6), [3, 4, 5]);
    let empty = Disk::new(1);
    let file = open(&empty, settings(8));
    empty.set_fault(Fault::Full(1));
    let error = file.put(&value(1, 0)).unwrap_err();
    assert!(matches!(&error, StoreError::NoSpace { .. }), "{error}");
    assert_eq!(error.to_string(), "file: no space is left on the disk for memory/values");
    assert_eq!(file.counters().used_slots, 0);
    empty.set_fault(Fault::None);
    file.put(&value(1, 0)).unwrap();
    assert_eq!(found(&file, 0..2), [1]);
}

/// Puts again of keys that are there do not shrink a store on a full disk.
#[test]
fn a_full_disk_keeps_its_values() {
    let (disk, file) = stored(0..3);
    disk.set_fault(Fault::Full(disk.pages()));
    file.put(&value(3, 0)).unwrap();
    for version in 1..9 {
        for number in 1..4 {
            file.put(&value(number, version)).unwrap();
            assert_eq!(get(&file, number, version), Got::Version(version));
        }
        assert_eq!((file.counters().used_slots, file.counters().evictions), (3, 1));
    }
}

/// A full file system that copies on write takes no replacement either: at most one value is lost.
#[test]
fn a_full_disk_that_copies_on_write() {
    let (disk, file) = stored(0..6);
    disk.set_fault(Fault::FullCopies);
    for number in 6..20 {
        match file.put(&value(number, 0)) {
            Err(StoreError::NoSpace { .. }) => assert_eq!(number, 6),
            Err(StoreError::Declined { reason: "the disk is full", .. }) => assert!(number > 6),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found(&file, 0..20).len(), 5);
    assert_eq!((file.counters().evictions, file.counters().is_disk_full), (1, true));
}

/// A file system that becomes read-only: puts fail, and reads go on.
#[test]
fn a_read_only_disk() {
    let (disk, file) = stored(0..8);
    disk.set_fault(Fault::ReadOnly);
    for number in 8..11 {
        let error = file.put(&value(number, 0)).unwrap_err();
        assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
    // Nothing is evicted for them.
    assert_eq!(found(&file, 0..11).len(), 8);
    assert_eq!(file.counters().evictions, 0);
    disk.set_fault(Fault::None);
    file.put(&value(8, 0)).unwrap();
    assert_eq!(get(&file, 8, 0), Got::Version(0));
}

/// A dead drive opens the breaker, whatever is answered from memory meanwhile, and the first put
/// that is written closes it.
#[tokio::test]
async fn a_drive_that_does_not_write_opens_the_breaker() {
    let (disk, file) = stored(0..3);
    const REST: Duration = Duration::from_millis(50);
    let of = TierSettings { rest: REST, ..TierSettings::default() };
    let tier = SharedTier::new(FileStore::over(file), of).unwrap();
    let deadline = || Instant::now() + Duration::from_secs(30);
    disk.set_fault(Fault::ReadOnly);
    for _ in 0..3 {
        assert_eq!(tier.counters().breaker, BreakerState::Closed);
        assert_eq!(tier.exists(vec![key(0)], deadline()).await, [Outcome::Hit]);
        let put = tier.put(vec![value(9, 0)], deadline()).await;
        assert!(matches!(put[..], [Outcome::Failed(_)]), "{put:?}");
    }
    assert_eq!(tier.counters().breaker, BreakerState::Open);
    tokio::time::sleep(REST).await;
    assert_eq!(tier.exists(vec![key(0)], deadline()).await, [Outcome::Hit]);
    assert_eq!(tier.counters().breaker, BreakerState::Open);
    disk.set_fault(Fault::None);
    assert_eq!(tier.put(vec![value(9, 0)], deadline()).await, [Outcome::Stored]);
    assert_eq!(tier.counters().breaker, BreakerState::Closed);
}

/// A drive that does not read is an error, and no value is given up for it.
#[test]
fn a_drive_that_does_not_read() {
    let (disk, file) = stored(0..2);
    disk.set_fault(Fault::Unreadable);
    let error = file.get(&key(1)).err().expect("an error");
    assert!(matches!(error, StoreError::Drive { operation: "read", .. }), "{error}");
    assert!(matches!(reopened(&disk, settings(8)), Err(FileError::System { .. })));
    disk.set_fault(Fault::None);
    assert_eq!(found(&file, 0..2), [0, 1]);
}
