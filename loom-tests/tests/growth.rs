//! Theorem: a pool can be read and allocated from while it grows; a new frame is allocated only
//! after it was prepared and published; the last unit, filled by growth, merges; and the old
//! directory is freed once.
#![cfg(kvpool_loom)]

use kvpool_loom_tests::{Touched, check, check_to};
use loom::thread;

/// Growth inside the last segment and into a new one, during an allocation that the old pool cannot
/// meet.
#[test]
fn beside_allocate() {
    check_to(3, "growth::beside_allocate", || {
        let pool = Touched::growing(6, 12, 8);
        let held = pool.take(6, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let added = other.frames.grow(6, &mut |added| {
                other.touch(added);
                Ok(())
            });
            assert_eq!(added, Ok(kvpool_loom_tests::run(6, 6)));
        });
        if let Some(got) = pool.take(1, 6) {
            assert!(got.start.0 >= 6);
            pool.put(got);
        }
        thread.join().unwrap();
        pool.put(held);
        pool.finish();
    });
}

/// Growth of a partial unit during the free of its other frames: it merges once.
#[test]
fn beside_free() {
    check("growth::beside_free", || {
        let pool = Touched::growing(6, 8, 8);
        let held = pool.take(6, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.frames.grow(2, &mut |_| Ok(())).unwrap();
        });
        pool.put(held);
        thread.join().unwrap();
        pool.finish();
    });
}
