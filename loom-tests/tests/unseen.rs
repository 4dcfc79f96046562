//! Theorem: a lease that gave out no handle releases its blocks with plain stores where it may: a
//! move that another thread attempts is neither overwritten nor lost, and the next owner of the
//! frame gets it once, with all earlier accesses visible. A lease that gave out a handle, or a
//! second lease of its blocks, does not: a thread that pins the block during a batch keeps the
//! frame from being reused until that batch has ended.
//!
//! Not modelled: a pin by a forged handle, at the moment of the plain store. The checker lets a
//! read-modify-write succeed after that store, as if it preceded the store, and then shows its
//! result to later loads of the storing thread, which the language forbids. The test
//! `forged_pins_beside_releases` plays it with real threads.
#![cfg(kvpool_loom)]

use kvpool::{AllocRequest, FrameId, Lease};
use kvpool_loom_tests::{Memory, check_to, join_last};
use loom::thread;

fn one() -> AllocRequest {
    AllocRequest::new(1)
}

/// Attempts to move the block in frame 0 to frame 1, if that is free.
fn move_beside(memory: &Memory) {
    let (mut stayed, to) = (0, FrameId(1));
    let wave = memory.pool.blocks().begin_wave([(FrameId(0), to)], &mut |_, _| stayed += 1);
    for (from, to) in wave.moves() {
        memory.read(from);
        memory.write(to);
    }
    // SAFETY: the cell that stands for the bytes was written.
    let moved = unsafe { wave.publish(&mut |_, _| stayed += 1) };
    assert_eq!(moved + stayed, 1);
}

/// The lease is sealed, so that its block can move: the release and the move exclude each other.
#[test]
fn a_sealed_block_against_a_move() {
    check_to(2, "unseen::a_sealed_block_against_a_move", || {
        let memory = Memory::new(2);
        let mut lease = memory.pool.allocate(one()).unwrap();
        assert_eq!(lease.frames().next(), Some(FrameId(0)));
        memory.write(FrameId(0));
        lease.seal(..);
        let other = memory.clone();
        let thread = thread::spawn(move || move_beside(&other));
        drop(lease);
        memory.pass();
        join_last(thread);
        memory.finish();
    });
}

/// The lease is open again when it is released: a move that began before was refused.
#[test]
fn a_reopened_block_against_a_move() {
    check_to(2, "unseen::a_reopened_block_against_a_move", || {
        let memory = Memory::new(2);
        let mut lease = memory.pool.allocate(one()).unwrap();
        lease.seal(..);
        let other = memory.clone();
        let thread = thread::spawn(move || move_beside(&other));
        if lease.reopen(0) {
            memory.write(lease.frames().next().unwrap());
        }
        drop(lease);
        memory.pass();
        thread.join().unwrap();
        memory.finish();
    });
}

/// Another thread has a handle. If it pins the block during a batch, the frame is still the
/// block's while the batch lasts: it is retired, not reused. The lease is passed through `pass_on`
/// before it is dropped, so it must carry on that a handle was given out.
fn release_against_a_pin(name: &str, pass_on: impl Fn(&mut Option<Lease<'_>>) + Sync + Send + 'static) {
    check_to(2, name, move || {
        let memory = Memory::new(1);
        let mut lease = Some(memory.pool.allocate(one()).unwrap());
        let handle = lease.iter().flat_map(Lease::handles).next().unwrap();
        memory.write(FrameId(0));
        let other = memory.clone();
        let thread = thread::spawn(move || {
            let batch = other.pool.blocks().begin_batch();
            if let Ok(pin) = other.pool.pin_scoped(handle) {
                other.read(FrameId(0));
                drop(pin);
            }
            other.pool.blocks().end_batch(batch);
        });
        pass_on(&mut lease);
        drop(lease);
        memory.pass();
        join_last(thread);
        memory.finish();
    });
}

#[test]
fn a_release_against_a_pin_in_a_batch() {
    release_against_a_pin("unseen::a_release_against_a_pin_in_a_batch", |_| {});
}

#[test]
fn split_off_after_a_handle_was_given_out() {
    release_against_a_pin("unseen::split_off_after_a_handle_was_given_out", |lease| {
        let tail = lease.as_mut().map(|lease| lease.split_off(0));
        drop(tail);
    });
}

#[test]
fn owned_after_a_handle_was_given_out() {
    release_against_a_pin("unseen::owned_after_a_handle_was_given_out", |lease| {
        drop(lease.take().map(Lease::into_owned));
    });
}

/// A second lease of the block, on another thread, which reads it: whichever is dropped last frees
/// the block, after both.
#[test]
fn two_leases_of_a_block() {
    check_to(2, "unseen::two_leases_of_a_block", || {
        let memory = Memory::new(1);
        let lease = memory.pool.allocate(one()).unwrap();
        memory.write(FrameId(0));
        let shared = lease.share().unwrap().into_owned();
        let other = memory.clone();
        let thread = thread::spawn(move || {
            other.read(shared.frames().next().unwrap());
            drop(shared);
        });
        drop(lease);
        memory.pass();
        join_last(thread);
        memory.finish();
    });
}

/// A lease opens its block again and writes it once the second lease, which read it, is gone.
#[test]
fn a_reopen_beside_a_second_lease() {
    check_to(2, "unseen::a_reopen_beside_a_second_lease", || {
        let memory = Memory::new(1);
        let mut lease = memory.pool.allocate(one()).unwrap();
        memory.write(FrameId(0));
        lease.seal(..);
        let shared = lease.share().unwrap().into_owned();
        let other = memory.clone();
        let thread = thread::spawn(move || {
            other.read(shared.frames().next().unwrap());
            drop(shared);
        });
        if lease.reopen(0) {
            memory.write(FrameId(0));
        }
        join_last(thread);
        drop(lease);
        memory.finish();
    });
}

/// As `two_leases_of_a_block`, and the second lease gives out a handle, by which its thread pins
/// the block in a batch.
#[test]
fn a_release_against_a_pin_by_a_second_lease() {
    check_to(2, "unseen::a_release_against_a_pin_by_a_second_lease", || {
        let memory = Memory::new(1);
        let lease = memory.pool.allocate(one()).unwrap();
        let shared = lease.share().unwrap();
        let handle = shared.handles().next().unwrap();
        drop(shared);
        memory.write(FrameId(0));
        let other = memory.clone();
        let thread = thread::spawn(move || {
            let batch = other.pool.blocks().begin_batch();
            if let Ok(pin) = other.pool.pin_scoped(handle) {
                other.read(FrameId(0));
                drop(pin);
            }
            other.pool.blocks().end_batch(batch);
        });
        drop(lease);
        memory.pass();
        join_last(thread);
        memory.finish();
    });
}
