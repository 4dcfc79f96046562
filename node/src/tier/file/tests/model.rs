//! Random operations against a map, with restarts and damage.

use std::collections::HashMap;

use super::super::slot_file::SlotFile;
use super::platter::Disk;
use super::support::{Got, get, key, open, settings, value};
use crate::tier::StoreError;
use crate::tier::file::Admission;

const KEYS: u64 = 30;
const SLOTS: u64 = 10;
const VERSIONS: u64 = 5;

fn run(seed: u64, admission: Admission) -> [usize; 4] {
    let (disk, mut random) = (Disk::new(seed), fastrand::Rng::with_seed(seed));
    let mut of = settings(SLOTS);
    of.admission = admission;
    let mut file = open(&disk, of.clone());
    // The last version that was stored of each key.
    let (mut stored, mut hits, mut damaged) = (HashMap::new(), 0, 0);
    let (mut declined, mut restarts) = (0, 0);
    for _ in 0..400 {
        let number = random.u64(0..KEYS);
        match random.u32(0..20) {
            0..8 => {
                let version = random.u64(0..=VERSIONS);
                match file.put(&value(number, version)) {
                    Ok(()) => _ = stored.insert(number, version),
                    Err(StoreError::Declined { .. }) => declined += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            8..17 => {
                let was_there = file.exists(&[key(number)])[0];
                match get(&file, number, VERSIONS) {
                    Got::Version(version) => {
                        hits += 1;
                        assert_eq!(stored.get(&number), Some(&version), "seed {seed}");
                        assert!(was_there);
                    }
                    Got::Damaged => damaged += 1,
                    Got::Miss => assert!(!was_there),
                }
            }
            17 => {
                drop(file);
                file = open(&disk, of.clone());
                restarts += 1;
            }
            18 => disk.change(false, |bytes| {
                if let Some(byte) = random.choice(&mut *bytes) {
                    *byte ^= 0x10;
                }
            }),
            _ => {
                let counters = file.counters();
                let there = (0..KEYS).filter(|number| file.exists(&[key(*number)])[0]).count();
                assert_eq!(there as u64, counters.used_slots);
                assert!(counters.used_slots <= SLOTS);
            }
        }
    }
    [hits, damaged, declined, restarts]
}

#[test]
fn operations_agree_with_a_map() {
    for admission in [Admission::Always, Admission::Second] {
        let mut sums = [0; 4];
        for seed in 0..60 {
            let counts = run(seed, admission);
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        let [hits, damaged, declined, restarts] = sums;
        assert!(hits > 2000 && damaged > 50 && restarts > 500, "{sums:?}");
        assert_eq!(declined > 100, admission == Admission::Second, "{sums:?}");
    }
}

/// Threads that put, replace, evict and read the same keys: no byte is wrong, and no slot is lost.
#[test]
fn threads_agree() {
    let disk = Disk::new(0);
    let file = open(&disk, settings(SLOTS));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let file = &file;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..2000 {
                    let number = random.u64(0..16);
                    if random.bool() {
                        match file.put(&value(number, random.u64(0..=VERSIONS))) {
                            Ok(()) | Err(StoreError::Refused { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    } else {
                        assert_ne!(get(file, number, VERSIONS), Got::Damaged);
                    }
                }
            });
        }
    });
    for number in 100..200 {
        file.put(&value(number, 0)).unwrap();
        assert_eq!(get(&file, number, 0), Got::Version(0));
    }
    assert_eq!(file.counters().used_slots, SLOTS);
    let there =
        |file: &SlotFile| (0..200).filter(|number| file.exists(&[key(*number)])[0]).collect::<Vec<_>>();
    let before = there(&file);
    drop(file);
    assert_eq!((there(&open(&disk, settings(SLOTS))), before.len()), (before, SLOTS as usize));
}
