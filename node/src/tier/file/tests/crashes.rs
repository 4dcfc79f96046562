use std::collections::HashSet;

use super::platter::{Disk, Fault};
use super::support::{Got, get, open, reopened, settings, value};

const SLOTS: u64 = 6;

/// A key, and the version of its value.
type Put = (u64, u64);

/// Puts that fill the store, replace a value and evict others. Returns the versions of the keys
/// whose put was confirmed, in order, and the put that was interrupted.
fn work(disk: &Disk) -> (Vec<Put>, Option<Put>) {
    let mut confirmed = Vec::new();
    let puts =
        [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (4, 0), (5, 0), (2, 1), (6, 0), (7, 0), (0, 1), (8, 0)];
    let Ok(file) = reopened(disk, settings(SLOTS)) else { return (confirmed, None) };
    for put in puts {
        let is_stored = file.put(&value(put.0, put.1)).is_ok();
        if disk.has_ended() {
            return (confirmed, Some(put));
        }
        assert!(is_stored, "{put:?}");
        confirmed.push(put);
    }
    (confirmed, None)
}

/// The process ends within every write in turn, the torn one of a random length: what was confirmed
/// is found, but the key that was evicted for the put in flight may be lost.
#[test]
fn the_process_ends_at_every_write() {
    let (mut ends, mut all_confirmed) = (0, false);
    for seed in 0..4 {
        for writes in 0.. {
            let disk = Disk::new(seed << 32 | writes);
            disk.set_fault(Fault::EndsAfter(writes));
            let (confirmed, interrupted) = work(&disk);
            all_confirmed = !disk.has_ended();
            disk.set_fault(Fault::None);
            if all_confirmed {
                break;
            }
            ends += 1;
            let file = open(&disk, settings(SLOTS));
            let latest = |number| confirmed.iter().rev().find(|put| put.0 == number).map(|put| put.1);
            let keys: HashSet<u64> = confirmed.iter().map(|put| put.0).collect();
            let mut missing = 0;
            for number in 0..9 {
                let got = get(&file, number, 1);
                match (got, latest(number)) {
                    (Got::Miss, Some(_)) => missing += 1,
                    (Got::Miss, None) => {}
                    (Got::Version(version), Some(latest)) if version == latest => {}
                    // Its put was written, and not confirmed.
                    (Got::Version(version), _) => {
                        assert_eq!(interrupted, Some((number, version)), "{writes}")
                    }
                    (Got::Damaged, _) => panic!("key {number} after {writes} writes"),
                }
            }
            // The store has as many slots, and one more value was in flight.
            let evicted = keys.len().saturating_sub(SLOTS as usize);
            assert!(missing <= evicted + 1, "{missing} of {} are missing after {writes} writes", keys.len());
            // The record or the superblock that was torn.
            assert!(file.counters().damaged_slots <= 1, "after {writes} writes");
            // It goes on.
            file.put(&value(20, 0)).unwrap();
            assert_eq!(get(&file, 20, 0), Got::Version(0));
        }
    }
    assert!(all_confirmed && ends > 4 * 20, "{ends}");
}

/// Without a flush, a power failure keeps any of the sectors that were written: no byte is wrong,
/// damaged slots are misses and can be used again.
#[test]
fn the_power_fails() {
    let (mut found, mut damaged) = (0, 0);
    for seed in 0..150 {
        let disk = Disk::new(seed);
        let file = open(&disk, settings(SLOTS));
        for number in 0..4 {
            file.put(&value(number, 0)).unwrap();
        }
        disk.sync();
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..random.usize(1..12) {
            file.put(&value(random.u64(0..9), random.u64(0..3))).unwrap();
        }
        drop(file);
        disk.lose_power();
        let file = open(&disk, settings(SLOTS));
        for number in 0..9 {
            match get(&file, number, 2) {
                Got::Version(_) => found += 1,
                Got::Damaged => {
                    damaged += 1;
                    assert_eq!(get(&file, number, 2), Got::Miss, "the slot is free");
                }
                Got::Miss => {}
            }
        }
        for number in 10..20 {
            file.put(&value(number, 0)).unwrap();
            assert_eq!(get(&file, number, 0), Got::Version(0));
        }
        assert_eq!(file.counters().used_slots, SLOTS);
    }
    assert!(found > 150 && damaged > 40, "{found} found, {damaged} damaged");
}

/// A power failure within the first format leaves a directory that can be opened.
#[test]
fn the_power_fails_in_a_format() {
    let mut kept = 0;
    for seed in 0..200 {
        let disk = Disk::new(seed);
        open(&disk, settings(SLOTS)).put(&value(1, 0)).unwrap();
        disk.lose_power();
        match reopened(&disk, settings(SLOTS)) {
            Ok(file) => {
                kept += u64::from(matches!(get(&file, 1, 0), Got::Version(0)));
                file.put(&value(2, 0)).unwrap();
                assert_eq!(get(&file, 2, 0), Got::Version(0));
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!((1..200).contains(&kept), "{kept}");
}
