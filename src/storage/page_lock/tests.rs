use super::*;

impl PageLocks {
    fn get_now(&self, frames: usize, make: impl FnOnce(usize) -> Result<(), Refusal>) -> Option<PageLock> {
        self.get(Instant::now(), || frames, make)
    }
}

fn lock(_: usize) -> Result<(), Refusal> {
    Ok(())
}

#[test]
fn pages_are_locked_once_and_again_for_more_frames() {
    let locks = PageLocks::default();
    let first = locks.get_now(4, lock).unwrap();
    assert!(Arc::ptr_eq(&first.0, &locks.get_now(4, |_| unreachable!()).unwrap().0));
    assert!(Arc::ptr_eq(&first.0, &locks.get_now(3, |_| unreachable!()).unwrap().0));
    // A copy in progress still has the lock of fewer frames.
    assert!(locks.get_now(5, |_| unreachable!()).is_none());
    assert!(locks.get_now(4, |_| unreachable!()).is_none());
    drop(first);
    assert!(locks.get_now(5, lock).is_some());
}

#[test]
fn a_final_refusal_holds_until_the_frames_change() {
    let locks = PageLocks::default();
    assert!(locks.get_now(4, |_| Err(Refusal::Final)).is_none());
    let late = Instant::now() + 100 * PAUSE_MAX;
    assert!(locks.get(late, || 4, |_| -> Result<(), _> { unreachable!() }).is_none());
    assert!(locks.get_now(5, lock).is_some());
    locks.retire();
    assert!(locks.get_now(4, |_| Err(Refusal::Final)).is_none());
    locks.retire();
    assert!(locks.get_now(4, lock).is_some());
}

#[test]
fn a_refusal_for_now_is_tried_again_less_and_less_often() {
    let locks = PageLocks::default();
    let (begin, mut now) = (Instant::now(), Instant::now());
    let mut pauses = Vec::new();
    while pauses.len() < 9 {
        let mut tried = false;
        let refused = locks.get(
            now,
            || 4,
            |_| -> Result<(), _> {
                tried = true;
                Err(Refusal::ForNow)
            },
        );
        assert!(refused.is_none());
        if tried {
            pauses.push(now.duration_since(begin).as_secs());
        }
        now += Duration::from_secs(1);
    }
    // The first attempt is after no pause; the loop looks once a second.
    let first = pauses[0];
    let since: Vec<u64> = pauses.iter().map(|at| at - first).collect();
    assert_eq!(since, [0, 1, 3, 7, 15, 31, 63, 127, 191]);
    let again = locks.get(now + PAUSE_MAX, || 4, lock);
    assert!(again.is_some());
}

#[test]
fn a_caller_that_cannot_lock_leaves_it_to_others() {
    let locks = PageLocks::default();
    assert!(locks.get_now(4, |_| Err(Refusal::OfCaller)).is_none());
    assert!(locks.get_now(4, lock).is_some());
}

#[test]
fn pages_are_locked_again_when_they_were_unlocked() {
    struct Unlocks(Arc<PageLocks>);
    impl Drop for Unlocks {
        fn drop(&mut self) {
            assert!(self.0.get_now(4, |_| unreachable!("still locked")).is_none());
        }
    }
    let locks = Arc::new(PageLocks::default());
    let held = locks.get(Instant::now(), || 4, |_| Ok(Unlocks(locks.clone()))).unwrap();
    locks.retire();
    drop(held);
    assert!(locks.get_now(4, lock).is_some());
}

#[test]
fn a_lock_has_the_frames_that_a_retirement_left() {
    let locks = PageLocks::default();
    // The number falls between the call and the count, as in a concurrent shrink.
    let usable = std::cell::Cell::new(100);
    let mut made = 0;
    let count = || {
        assert!(locks.0.try_lock().is_err(), "no retirement goes by while frames are counted");
        usable.replace(50)
    };
    let mut make = |frames| {
        made = frames;
        lock(frames)
    };
    assert!(locks.get(Instant::now(), count, &mut make).is_some());
    locks.retire();
    assert!(locks.get(Instant::now(), || usable.get(), &mut make).is_some());
    assert_eq!(made, 50);
}

#[test]
fn nobody_waits_for_a_thread_that_locks() {
    let locks = PageLocks::default();
    let made = locks.get_now(1, |_| {
        assert!(locks.get_now(1, |_| unreachable!()).is_none());
        lock(1)
    });
    assert!(made.is_some());
}

#[test]
fn a_panic_while_pages_are_locked_leaves_the_next_attempt_possible() {
    let locks = PageLocks::default();
    let panics = || locks.get_now(4, |_| -> Result<(), _> { panic!("a driver that panics") });
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert!(locks.get_now(4, lock).is_some());
}
