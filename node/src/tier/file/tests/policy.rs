use super::super::record::Record;
use super::super::slot_file::slot_bytes;
use super::super::table::SlotTable;
use super::platter::Disk;
use super::support::{Got, PACKED, block, found, get, key, open, settings, value, value_of};
use crate::tier::file::Admission;
use crate::tier::{Fingerprint, StoreError, TierKey, TierValue, value_bytes};

/// A restart finds everything, and goes on evicting the oldest.
#[test]
fn a_restart_finds_everything() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(100));
    (0..100).for_each(|number| file.put(&value(number, 0)).unwrap());
    drop(file);
    let file = open(&disk, settings(100));
    // No get before the puts: a hit keeps a value longer.
    assert_eq!(file.exists(&(0..100).map(key).collect::<Vec<_>>()), [true; 100]);
    (100..130).for_each(|number| file.put(&value(number, 0)).unwrap());
    assert_eq!(found(&file, 0..130), (30..130).collect::<Vec<_>>());
    assert_eq!(file.counters().evictions, 30);
}

/// Values that are read stay, and those that are not make room, in order.
#[test]
fn eviction_keeps_what_is_read() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(100));
    (0..100).for_each(|number| file.put(&value(number, 0)).unwrap());
    for number in 100..200 {
        assert_eq!(found(&file, 10..20).len(), 10);
        file.put(&value(number, 0)).unwrap();
    }
    assert_eq!(found(&file, 10..20), (10..20).collect::<Vec<_>>());
    let others = found(&file, 0..200);
    assert_eq!(others.len(), 100);
    assert!(others[10..].iter().all(|number| *number >= 110), "{others:?}");
}

/// A full store takes a key when it comes for the second time, and at once what it has, what it
/// evicted, and whatever it has space for.
#[test]
fn the_second_sight_is_admitted() {
    let disk = Disk::new(0);
    let mut of = settings(100);
    of.admission = Admission::Second;
    let file = open(&disk, of);
    (0..100).for_each(|number| file.put(&value(number, 0)).unwrap());
    for number in 1000..1050 {
        let declined = file.put(&value(number, 0)).unwrap_err();
        assert!(matches!(declined, StoreError::Declined { .. }), "{declined}");
    }
    assert_eq!(found(&file, 0..100).len(), 100);
    assert_eq!((file.counters().declined_first, file.counters().writes), (50, 100));
    // A few may be forgotten, whose place another key took.
    let admitted = (1000..1050).filter(|number| file.put(&value(*number, 0)).is_ok()).count();
    assert!(admitted >= 35, "{admitted}");
    let evicted = (0..100).find(|number| !file.exists(&[key(*number)])[0]).unwrap();
    file.put(&value(evicted, 0)).unwrap();
    file.put(&value(evicted, 1)).unwrap();
    assert_eq!(get(&file, evicted, 1), Got::Version(1));
}

#[test]
fn writes_beyond_the_rate_are_declined() {
    let disk = Disk::new(0);
    let mut of = settings(100);
    // One slot at once, and one every 1,000 s.
    of.write_rate = Some(slot_bytes(value_bytes(PACKED)) as u64 / 1000);
    let file = open(&disk, of);
    file.put(&value(0, 0)).unwrap();
    for number in 1..10 {
        let declined = file.put(&value(number, 0)).unwrap_err();
        assert!(declined.to_string().contains("write rate"), "{declined}");
    }
    assert_eq!((file.counters().writes, file.counters().declined_by_rate), (1, 9));
    assert_eq!(found(&file, 0..10), [0]);
}

/// The first value tells the size of all. Smaller ones fit, and larger ones are declined: no value
/// is given up for them. A store without values takes any size.
#[test]
fn values_of_another_size() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(10));
    assert_eq!(file.counters().slots, 0);
    (0..10).for_each(|number| file.put(&value(number, 0)).unwrap());
    assert_eq!(file.counters().slots, 10);
    let large = value_of(50, 0, 9 * PACKED);
    drop(file);
    for _ in 0..2 {
        let file = open(&disk, settings(10));
        let declined = file.put(&large).unwrap_err();
        assert!(matches!(declined, StoreError::Declined { .. }), "{declined}");
        assert!(declined.to_string().contains("use another directory"), "{declined}");
        assert_eq!(found(&file, 0..10).len(), 10);
    }
    let small = value_of(60, 0, 100);
    let file = open(&disk, settings(10));
    file.put(&small).unwrap();
    assert_eq!(file.get(&key(60)).unwrap().unwrap().as_ref(), small.bytes());
    assert_eq!(found(&file, 0..10).len(), 9);
    drop(file);
    let disk = Disk::new(1);
    let file = open(&disk, settings(10));
    file.put(&small).unwrap();
    disk.change(false, |bytes| bytes.fill(1));
    assert!(file.get(&key(60)).is_err());
    file.put(&large).unwrap();
    assert_eq!(file.get(&key(50)).unwrap().unwrap().as_ref(), large.bytes());
    drop(file);
    assert_eq!(open(&disk, settings(10)).counters().used_slots, 1);
    let none = open(&Disk::new(2), settings(0));
    let refused = none.put(&large).unwrap_err();
    assert!(refused.to_string().contains("no space for a value"), "{refused}");
}

/// Keys of another fingerprint are misses, and their slots are used again.
#[test]
fn another_fingerprint() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(10));
    (0..10).for_each(|number| file.put(&value(number, 0)).unwrap());
    let other = TierKey { fingerprint: Fingerprint::from_bytes([4; 16]), ..key(1) };
    assert!(file.get(&other).unwrap().is_none());
    assert_eq!(file.exists(&[other]), [false]);
    let fill = |bytes: &mut [u8]| {
        bytes.copy_from_slice(&block(1, 7, PACKED));
        Ok::<_, ()>(())
    };
    file.put(&TierValue::new(other, &[], PACKED, fill).unwrap()).unwrap();
    assert!(file.get(&other).unwrap().is_some());
    assert_eq!(found(&file, 0..10), (1..10).collect::<Vec<_>>());
}

/// A store that is opened with a smaller size keeps its values, and gives up free slots only.
#[test]
fn another_size_of_the_store() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(10));
    (0..10).for_each(|number| file.put(&value(number, 0)).unwrap());
    drop(file);
    let file = open(&disk, settings(4));
    assert_eq!((file.counters().slots, file.counters().used_slots), (10, 10));
    assert_eq!(found(&file, 0..10).len(), 10);
    drop(file);
    let file = open(&disk, settings(20));
    assert_eq!((file.counters().slots, file.counters().used_slots), (20, 10));
    drop(file);
    let file = open(&disk, settings(14));
    assert_eq!((file.counters().slots, file.counters().used_slots), (14, 10));
    (10..14).for_each(|number| file.put(&value(number, 0)).unwrap());
    assert_eq!(found(&file, 0..14).len(), 14);
}

/// A value that is being read is not overwritten: its slot is evicted later.
#[test]
fn a_slot_that_is_read_stays() {
    let mut table = SlotTable::new(2, [], &mut Vec::new());
    for number in 0..2 {
        let taken = table.take().unwrap();
        let of = Record { key: key(number), generation: taken.generation, length: PACKED as u32 };
        assert_eq!(table.finish(taken.slot, of), None);
    }
    let (slot, record) = table.pin(&key(0)).unwrap();
    assert_eq!((slot, record.generation), (0, 1));
    // Another put of the key: the former slot is free when its reader has ended.
    let taken = table.take().unwrap();
    assert_eq!((taken.slot, taken.evicted.map(|evicted| evicted.key)), (1, Some(key(1))));
    assert!(table.take().is_none(), "one is read, and one is written");
    let again = Record { generation: taken.generation, ..record };
    assert_eq!(table.finish(taken.slot, again), None);
    assert_eq!((table.find(&key(0)), table.has_free()), (Some(1), false));
    assert!(table.unpin(slot));
    table.clear(slot);
    assert!(table.has_free());
}

/// Several readers of a damaged value count it once, and the last of them frees its slot.
#[test]
fn a_damaged_slot_is_condemned_once() {
    let mut table = SlotTable::new(1, [], &mut Vec::new());
    let taken = table.take().unwrap();
    let of = Record { key: key(0), generation: taken.generation, length: PACKED as u32 };
    assert_eq!(table.finish(taken.slot, of), None);
    let slots = [0, 1].map(|_| table.pin(&key(0)).unwrap().0);
    assert_eq!(slots.map(|slot| table.condemn(slot)), [true, false]);
    assert!(!table.is_idle());
    assert_eq!(slots.map(|slot| table.unpin(slot)), [false, true]);
    table.clear(0);
    assert!(table.is_idle());
}
