//! Theorem: each reference is released once, by its owner. A handle of a lease's block frees
//! nothing, however it interleaves with the steps by which a lease converts its references to
//! handles and back. A thread that frees a block by a handle older than such a step sees the writes
//! of the lease's owner. And a move published at that moment is not lost.
#![cfg(kvpool_loom)]

use kvpool::{AllocRequest, BlockHandle, FrameId, HandleError, Lease};
use kvpool_loom_tests::{Memory, check_to, join_last};
use loom::thread;

fn one() -> AllocRequest {
    AllocRequest::new(1)
}

fn is_refused(outcome: Result<(), HandleError>) -> bool {
    matches!(outcome, Err(HandleError::Guarded { .. } | HandleError::Stale { .. }))
}

/// A lease and a free by handle compete for one reference: one of them gets it.
#[test]
fn a_lease_against_a_free() {
    check_to(2, "guarded::a_lease_against_a_free", || {
        let memory = Memory::new(1);
        let mut handles = Vec::new();
        memory.pool.allocate_raw(one(), &mut handles).unwrap();
        let (other, handle) = (memory.clone(), handles[0]);
        let thread = thread::spawn(move || {
            let freed = other.pool.free(&[handle]);
            if freed.is_ok() {
                other.pass();
            }
            freed
        });
        let leased = match Lease::from_raw(&memory.pool, &handles) {
            Ok(lease) => {
                memory.write(lease.frames().next().unwrap());
                true
            }
            Err(error) => {
                assert!(matches!(error, HandleError::Stale { .. }), "{error}");
                false
            }
        };
        let freed = join_last(thread);
        assert!(freed.is_ok() != leased && (freed.is_ok() || is_refused(freed)), "{freed:?}");
        memory.finish();
    });
}

/// With one more reference, the lease is refused, or the other thread is too late.
#[test]
fn a_lease_against_a_share() {
    check_to(3, "guarded::a_lease_against_a_share", || {
        let memory = Memory::new(1);
        let mut handles = Vec::new();
        memory.pool.allocate_raw(one(), &mut handles).unwrap();
        let (other, handle) = (memory.clone(), handles[0]);
        let thread = thread::spawn(move || {
            let shared = other.pool.share(&[handle]);
            if shared.is_ok() {
                other.pool.free(&[handle]).expect("our own reference");
            }
            shared
        });
        match Lease::from_raw(&memory.pool, &handles) {
            Ok(lease) => memory.write(lease.frames().next().unwrap()),
            Err(error) => {
                assert_eq!(error, HandleError::Shared { id: handle.id });
                memory.pool.free(&handles).expect("our own reference");
            }
        }
        let shared = join_last(thread);
        assert!(shared.is_ok() || is_refused(shared), "{shared:?}");
        memory.finish();
    });
}

/// A handle older than the step frees the block after it, once, and sees the writes of the lease's
/// owner.
#[test]
fn handles_of_a_lease_against_a_free() {
    check_to(3, "guarded::handles_of_a_lease_against_a_free", || {
        let memory = Memory::new(1);
        let lease = memory.pool.allocate(one()).unwrap();
        let handle: BlockHandle = lease.handles().next().unwrap();
        let other = memory.clone();
        let thread = thread::spawn(move || {
            let freed = other.pool.free(&[handle]);
            if freed.is_ok() {
                other.pass();
            }
            freed
        });
        memory.write(lease.frames().next().unwrap());
        let handles = lease.into_raw();
        let mine = memory.pool.free(&handles);
        let theirs = join_last(thread);
        assert!(mine.is_ok() != theirs.is_ok(), "{mine:?} {theirs:?}");
        assert!([mine, theirs].into_iter().all(|outcome| outcome.is_ok() || is_refused(outcome)));
        memory.finish();
    });
}

/// A move is published, and a pin taken, while a lease converts its block to handles.
#[test]
fn handles_of_a_lease_against_a_move() {
    check_to(2, "guarded::handles_of_a_lease_against_a_move", || {
        let memory = Memory::new(2);
        let mut lease = memory.pool.allocate(one()).unwrap();
        lease.seal(..);
        let from = lease.frames().next().unwrap();
        let other = memory.clone();
        let thread = thread::spawn(move || {
            let mut stayed = 0;
            let to = FrameId(1 - from.0);
            let wave = other.pool.blocks().begin_wave([(from, to)], &mut |_, _| stayed += 1);
            for (_, to) in wave.moves() {
                other.write(to);
            }
            // SAFETY: the cell that stands for the bytes was written.
            let moved = unsafe { wave.publish(&mut |_, _| stayed += 1) };
            assert_eq!(moved + stayed, 1);
            moved == 1
        });
        let handles = lease.into_raw();
        let moved = join_last(thread);
        let info = memory.pool.info(handles[0]).unwrap();
        assert_eq!((info.frame != from, info.refs, info.sealed), (moved, 1, true));
        memory.pool.free(&handles).expect("they are handles by now");
        memory.finish();
    });
}
