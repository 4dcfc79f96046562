//! Theorem: no task that waits for batches sleeps beside their end. Whatever ends them, in whatever
//! order, and wherever the task is at that moment, it is woken; and afterwards it sees what the
//! batches did. A thread that sleeps forever is a deadlock, which the checker reports.
//!
//! Theorem: once no task waits, no batch's end looks for one. A task that was dropped does not
//! count.
#![cfg(kvpool_loom)]

use std::pin::pin;
use std::task::{Context, Poll};

use kvpool::clock::{BatchRef, BatchSet, Clock, EndPlace};
use kvpool::{Pool, SequenceId, Ticket};
use kvpool_loom_tests::{block_on, check, check_to, join_last, lull};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A wait for batches of a bare clock.
struct Wait<'a> {
    clock: &'a Clock,
    batches: BatchSet,
    place: EndPlace,
}

impl<'a> Wait<'a> {
    fn new(clock: &'a Clock, batches: BatchSet) -> Self {
        Self { clock, batches, place: EndPlace::default() }
    }

    fn up_to(clock: &'a Clock, ticket: Ticket) -> Self {
        let mut batches = BatchSet::default();
        batches.add_up_to(ticket);
        Self::new(clock, batches)
    }
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { clock, batches, place } = &mut *self;
        clock.poll_ended(batches, place, context)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.clock.leave_ends(&mut self.place);
    }
}

fn end(clock: &Clock, batch: kvpool::clock::InFlight) {
    assert!(!clock.end(batch), "no request waits for blocks");
}

fn is_quiet(clock: &Clock) {
    assert_eq!(clock.waiting_for_ends(), 0);
    assert!(!clock.read().is_end_awaited() && clock.read().is_quiet());
}

/// One batch, whose writes the task sees.
#[test]
fn the_end_of_one() {
    check_to(3, "settled::the_end_of_one", || {
        let clock = Arc::new(Clock::default());
        let bytes = Arc::new(UnsafeCell::new(0));
        let batch = clock.begin();
        let mut batches = BatchSet::default();
        clock.note(&mut batches, batch.batch(), &mut BatchRef::default());
        let writer = thread::spawn({
            let (clock, bytes) = (clock.clone(), bytes.clone());
            move || {
                // SAFETY: the checker finds a reader at the same time.
                bytes.with_mut(|bytes| unsafe { *bytes = 7 });
                end(&clock, batch);
            }
        });
        block_on(Wait::new(&clock, batches));
        // SAFETY: as above.
        assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 7);
        join_last(writer);
        is_quiet(&clock);
    });
}

/// Two batches end at the same time: the end that finds the other one looking leaves it word.
#[test]
fn the_end_of_two() {
    check("settled::the_end_of_two", || {
        let clock = Arc::new(Clock::default());
        let (a, b) = (clock.begin(), clock.begin());
        let mut batches = BatchSet::default();
        clock.note(&mut batches, a.batch(), &mut BatchRef::default());
        clock.note(&mut batches, b.batch(), &mut BatchRef::default());
        let threads = [a, b].map(|batch| {
            let clock = clock.clone();
            thread::spawn(move || end(&clock, batch))
        });
        block_on(Wait::new(&clock, batches));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        is_quiet(&clock);
    });
}

/// The slot of a batch that ended is taken by a later one at once: that is another batch.
#[test]
fn a_later_batch_in_its_slot() {
    check("settled::a_later_batch_in_its_slot", || {
        let clock = Arc::new(Clock::default());
        let batch = clock.begin();
        let mut batches = BatchSet::default();
        clock.note(&mut batches, batch.batch(), &mut BatchRef::default());
        let thread = thread::spawn({
            let clock = clock.clone();
            move || {
                end(&clock, batch);
                clock.begin()
            }
        });
        block_on(Wait::new(&clock, batches));
        let later = join_last(thread);
        end(&clock, later);
        is_quiet(&clock);
    });
}

/// A batch begins while another task waits up to the ticket of the one before.
#[test]
fn all_up_to_a_ticket() {
    check("settled::all_up_to_a_ticket", || {
        let clock = Arc::new(Clock::default());
        let (a, b) = (clock.begin(), clock.begin());
        let newest = b.ticket();
        end(&clock, b);
        let beginner = thread::spawn({
            let clock = clock.clone();
            move || clock.begin()
        });
        let ender = thread::spawn({
            let clock = clock.clone();
            move || end(&clock, a)
        });
        block_on(Wait::up_to(&clock, newest));
        let later = beginner.join().unwrap();
        join_last(ender);
        assert!(clock.ended(newest) && later.ticket() > newest);
        end(&clock, later);
        is_quiet(&clock);
    });
}

/// Two batches begin at once. The bound in the later one's slot may be the earlier one's ticket,
/// which its end will never announce.
#[test]
fn a_batch_that_is_beginning() {
    check("settled::a_batch_that_is_beginning", || {
        let clock = Arc::new(Clock::default());
        let bytes = Arc::new(UnsafeCell::new(0));
        let beginner = thread::spawn({
            let (clock, bytes) = (clock.clone(), bytes.clone());
            move || {
                let batch = clock.begin();
                if batch.ticket() > Ticket(1) {
                    return Some(batch);
                }
                // SAFETY: the checker finds a reader at the same time.
                bytes.with_mut(|bytes| unsafe { *bytes = 7 });
                end(&clock, batch);
                None
            }
        });
        let batch = clock.begin();
        let newest = batch.ticket();
        end(&clock, batch);
        block_on(Wait::up_to(&clock, newest));
        if newest > Ticket(1) {
            // SAFETY: as above. The other batch is the earlier one.
            assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 7);
        }
        if let Some(later) = join_last(beginner) {
            end(&clock, later);
        }
        is_quiet(&clock);
    });
}

/// Two tasks wait; one is dropped while the batch ends. The other is woken all the same.
#[test]
fn one_is_dropped() {
    check("settled::one_is_dropped", || {
        let clock = Arc::new(Clock::default());
        let batch = clock.begin();
        let ticket = batch.ticket();
        let other = thread::spawn({
            let clock = clock.clone();
            move || {
                let mut wait = Box::pin(Wait::up_to(&clock, ticket));
                let _ = wait.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()));
            }
        });
        let ender = thread::spawn({
            let clock = clock.clone();
            move || end(&clock, batch)
        });
        block_on(Wait::up_to(&clock, ticket));
        other.join().unwrap();
        join_last(ender);
        is_quiet(&clock);
    });
}

/// A sequence that a batch of another thread wrote, in a pool; a batch that began earlier and is
/// never ended is no obstacle.
#[test]
fn a_sequence_is_settled() {
    check("settled::a_sequence_is_settled", || {
        let layout = kvpool::storage::KvLayout::named("tiny").unwrap();
        let pool = Pool::builder(layout).blocks(4).segment_blocks(4).without_null_block();
        let pool = pool.without_storage().magazine_blocks(0).build().unwrap();
        let older = pool.begin_batch();
        let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 1).unwrap();
        let thread = thread::spawn(move || batch.finish());
        block_on(pool.settled(&sequence)).unwrap();
        join_last(thread);
        let mut wait = pin!(pool.settled_up_to(older.ticket()));
        let _bell = lull(wait.as_mut());
        older.finish();
        block_on(wait).unwrap();
        drop(sequence);
        is_quiet(pool.blocks().clock());
    });
}
