//! Theorem: every event published while there is a subscriber is received once, each publisher's in
//! its order; or it is counted as lost, and the loss is reported after the events before it and
//! before the same publisher's next. A subscriber sees in the pool whatever its events do not
//! report. A thread that follows the events of a cache knows in the end which blocks are cached,
//! and after a clear receives nothing that was noted before it. No reader sleeps while there is an
//! event, a loss, or the end to receive. No publisher waits: neither for a stopped reader nor for
//! another publisher. All of this holds for each of several subscribers, whatever the others do.
#![cfg(kvpool_loom)]

use std::collections::BTreeSet;
use std::pin::pin;

use kvpool::BlockId;
use kvpool::prefix::models;
use kvpool::prefix::{BlockHash, EventQueue, KvEvent, KvEvents};
use kvpool_loom_tests::{CachedBlocks, block_on, check, check_to, check_wide, lull};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering::Relaxed};
use loom::thread;

/// Returns the `i`th event of a publisher.
fn event(publisher: u32, i: u32) -> KvEvent {
    KvEvent::Removed { block: BlockId(publisher << 8 | i), hash: BlockHash::new(1, 2), group: 0 }
}

fn publisher(queue: &Arc<EventQueue>, number: u32, events: u32) -> thread::JoinHandle<()> {
    let queue = queue.clone();
    thread::spawn(move || (0..events).for_each(|i| assert!(queue.publish(|| event(number, i)))))
}

/// Receives to the end, and compares with the published events; returns the number of lost ones.
fn receive(mut events: KvEvents, published: &[u32]) -> u64 {
    let (mut time, mut number, mut lost, mut last_resync) = (0, 0, 0, 0);
    let mut seen: Vec<(u32, u64)> = vec![(0, 0); published.len()];
    while let Some(got) = block_on(events.recv()) {
        time += 1;
        assert_eq!(got.number, number, "an unreported gap");
        match got.event {
            KvEvent::Resync { lost: more } => {
                assert!(more > 0, "a reported loss of zero events");
                (lost, number, last_resync) = (lost + more, number + more, time);
            }
            KvEvent::Removed { block, .. } => {
                let (publisher, i) = ((block.0 >> 8) as usize, block.0 & 0xff);
                let (next, came) = seen[publisher];
                assert!(i >= next, "publisher {publisher}: {i} after {next}");
                assert!(
                    i == next || last_resync > came,
                    "publisher {publisher}: the loss of {next}..{i} was not reported"
                );
                seen[publisher] = (i + 1, time);
                number += 1;
            }
            other => panic!("received {other:?}, which was not published"),
        }
    }
    assert_eq!(
        number,
        published.iter().map(|&events| u64::from(events)).sum::<u64>(),
        "some events were neither received nor counted as lost"
    );
    for (&published, (next, came)) in published.iter().zip(seen) {
        assert!(
            next == published || last_resync > came,
            "the last events are lost, and the loss was not reported after the events before them"
        );
    }
    lost
}

/// One publisher, more events than room.
#[test]
fn one_publisher_and_a_small_queue() {
    check("kv_events::one_publisher_and_a_small_queue", || {
        let queue = Arc::new(EventQueue::new(2));
        let events = queue.subscribe().unwrap();
        let thread = publisher(&queue, 0, 3);
        drop(queue);
        receive(events, &[3]);
        thread.join().unwrap();
    });
}

/// Two publishers, which compete for the same positions, and one of which overwrites an event.
#[test]
fn two_publishers_and_a_small_queue() {
    check_to(1, "kv_events::two_publishers_and_a_small_queue", || {
        let queue = Arc::new(EventQueue::new(2));
        let events = queue.subscribe().unwrap();
        queue.publish(|| event(1, 0));
        let other = queue.clone();
        let other = thread::spawn(move || assert!(other.publish(|| event(1, 1))));
        let threads = [publisher(&queue, 0, 1), other];
        drop(queue);
        receive(events, &[1, 2]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// The reader starts when both publishers are done: one is stopped in the middle, and may be
/// overtaken by a lap.
#[test]
fn two_publishers_and_a_late_reader() {
    check("kv_events::two_publishers_and_a_late_reader", || {
        let queue = Arc::new(EventQueue::new(2));
        let events = queue.subscribe().unwrap();
        let thread = publisher(&queue, 0, 1);
        (0..2).for_each(|i| assert!(queue.publish(|| event(1, i))));
        drop(queue);
        thread.join().unwrap();
        receive(events, &[1, 2]);
    });
}

/// A full ring, and no publisher after the one that overwrites an event: the loss is reported all
/// the same.
#[test]
fn a_loss_is_told_without_another_event() {
    check_to(3, "kv_events::a_loss_is_told_without_another_event", || {
        let queue = Arc::new(EventQueue::new(2));
        let mut events = queue.subscribe().unwrap();
        queue.publish(|| event(1, 0));
        queue.publish(|| event(1, 1));
        let other = queue.clone();
        let thread = thread::spawn(move || {
            other.publish(|| event(0, 0));
            // The queue lives on, so its end wakes no reader.
            other
        });
        while block_on(events.recv()).expect("an event, or its loss").event != event(0, 0) {}
        drop((thread.join().unwrap(), queue));
    });
}

/// A subscriber that does not read loses events; another, with the same events, loses none that it
/// reads in time, and both are woken by the end.
#[test]
fn a_slow_subscriber_beside_another() {
    check_to(3, "kv_events::a_slow_subscriber_beside_another", || {
        let queue = Arc::new(EventQueue::new(2));
        let (slow, mut fast) = (queue.subscribe().unwrap(), queue.subscribe().unwrap());
        queue.publish(|| event(0, 0));
        queue.publish(|| event(0, 1));
        assert_eq!((0..2).filter(|_| fast.try_recv().is_some()).count(), 2);
        let other = queue.clone();
        let thread = thread::spawn(move || assert!(other.publish(|| event(0, 2))));
        drop(queue);
        let last = block_on(fast.recv()).expect("one more event, which is not overwritten");
        assert_eq!((last.number, last.event), (2, event(0, 2)));
        assert!(block_on(fast.recv()).is_none());
        assert_eq!(receive(slow, &[3]), 2);
        thread.join().unwrap();
    });
}

/// One subscriber sleeps, another is about to, and one publisher wakes both.
#[test]
fn two_subscribers_sleep() {
    check_to(3, "kv_events::two_subscribers_sleep", || {
        let queue = Arc::new(EventQueue::new(2));
        let (mut first, mut second) = (queue.subscribe().unwrap(), queue.subscribe().unwrap());
        let bell = lull(pin!(second.recv()));
        let publisher = publisher(&queue, 0, 1);
        assert_eq!(block_on(first.recv()).expect("an event").event, event(0, 0));
        bell.wait();
        assert_eq!(second.try_recv().expect("an event").event, event(0, 0));
        publisher.join().unwrap();
        // The queue lives on, so its end wakes no reader.
        drop(queue);
    });
}

/// Two threads subscribe at once, and a third publishes.
#[test]
fn two_subscribe_and_look() {
    check_to(2, "kv_events::two_subscribe_and_look", || {
        let queue = Arc::new(EventQueue::new(2));
        let stored = Arc::new(AtomicBool::new(false));
        let subscribe_and_look = |queue: &EventQueue, stored: &AtomicBool| {
            let events = queue.subscribe().unwrap();
            // Relaxed: the queue provides the order under test.
            (events, stored.load(Relaxed))
        };
        let (other, flag) = (queue.clone(), stored.clone());
        let publisher = thread::spawn(move || {
            flag.store(true, Relaxed);
            other.publish(|| event(0, 0));
        });
        let (other, flag) = (queue.clone(), stored.clone());
        let subscriber = thread::spawn(move || subscribe_and_look(&other, &flag));
        let own = subscribe_and_look(&queue, &stored);
        let others = subscriber.join().unwrap();
        publisher.join().unwrap();
        for (mut events, seen) in [own, others] {
            assert!(seen || events.try_recv().is_some(), "neither seen nor reported");
        }
    });
}

/// A new subscriber receives whatever it cannot see in the pool.
#[test]
fn subscribe_and_look() {
    check_to(3, "kv_events::subscribe_and_look", || {
        let queue = Arc::new(EventQueue::new(2));
        let stored = Arc::new(AtomicBool::new(false));
        let (other, flag) = (queue.clone(), stored.clone());
        let thread = thread::spawn(move || {
            // Relaxed: the queue provides the order under test.
            flag.store(true, Relaxed);
            other.publish(|| event(0, 0));
        });
        let mut events = queue.subscribe().unwrap();
        let seen = stored.load(Relaxed);
        thread.join().unwrap();
        assert!(seen || events.try_recv().is_some(), "neither seen nor reported");
    });
}

/// One subscriber leaves during a publication, and the next one arrives.
#[test]
fn one_subscriber_after_another() {
    check("kv_events::one_subscriber_after_another", || {
        let queue = Arc::new(EventQueue::new(2));
        let stored = Arc::new(AtomicBool::new(false));
        let first = queue.subscribe().unwrap();
        let (other, flag) = (queue.clone(), stored.clone());
        let thread = thread::spawn(move || {
            other.publish(|| event(0, 0));
            flag.store(true, Relaxed);
            other.publish(|| event(0, 1));
        });
        drop(first);
        let mut events = queue.subscribe().unwrap();
        let seen = stored.load(Relaxed);
        thread.join().unwrap();
        let told: Vec<KvEvent> = std::iter::from_fn(|| events.try_recv()).map(|told| told.event).collect();
        assert!(seen || told.last() == Some(&event(0, 1)), "neither seen nor reported: {told:?}");
    });
}

/// Returns the cached blocks, by a look at the pool.
fn look(pool: &CachedBlocks) -> BTreeSet<(BlockId, BlockHash)> {
    models::cached_blocks(&pool.cache, &pool.blocks).into_iter().collect()
}

/// Receives the events that are there, and changes what a thread knows by them.
fn receive_all(pool: &CachedBlocks, events: &mut KvEvents, known: &mut BTreeSet<(BlockId, BlockHash)>) {
    while let Some(told) = events.try_recv() {
        match told.event {
            KvEvent::Stored { block, hash, .. } => drop(known.insert((block, hash))),
            KvEvent::Removed { block, hash, .. } => drop(known.remove(&(block, hash))),
            KvEvent::Cleared => known.clear(),
            KvEvent::Resync { .. } => *known = look(pool),
            other => panic!("received {other:?}, which was not published"),
        }
    }
}

/// A thread that looked once, and follows the events to their end, knows which blocks are cached.
fn follow(pool: &CachedBlocks, events: &mut KvEvents, mut known: BTreeSet<(BlockId, BlockHash)>) {
    receive_all(pool, events, &mut known);
    assert_eq!(known, look(pool));
}

/// Subscribes and looks while `change` happens to a cache of one block.
fn subscribe_beside(name: &str, change: fn(&CachedBlocks)) {
    check(name, move || {
        let pool = CachedBlocks::with_events(1, 4);
        let other = pool.clone();
        let thread = thread::spawn(move || change(&other));
        let mut events = pool.cache.events().subscribe().unwrap();
        let known = look(&pool);
        thread.join().unwrap();
        follow(&pool, &mut events, known);
    });
}

#[test]
fn followed_while_a_block_is_stored() {
    subscribe_beside("kv_events::followed_while_a_block_is_stored", |pool| {
        pool.fill(1);
    });
}

#[test]
fn followed_while_a_block_is_stored_and_evicted() {
    subscribe_beside("kv_events::followed_while_a_block_is_stored_and_evicted", |pool| {
        pool.keep(1);
        pool.put(&pool.take(1).expect("it is evictable"));
    });
}

#[test]
fn followed_while_all_are_cleared() {
    subscribe_beside("kv_events::followed_while_all_are_cleared", |pool| {
        pool.keep(1);
        models::clear(&pool.cache);
    });
}

/// A subscriber follows one that leaves, or joins one that stays, while a block is stored, perhaps
/// again: the registration saw a subscriber, and not this one.
fn follow_another(name: &str, stays: bool, again: bool) {
    check(name, move || {
        let pool = CachedBlocks::with_events(1, 4);
        let first = pool.cache.events().subscribe().unwrap();
        if again {
            pool.keep(1);
        }
        let other = pool.clone();
        let thread = thread::spawn(move || {
            if again {
                other.put(&other.take(1).expect("it is evictable"));
            }
            other.fill(1);
        });
        let first = stays.then_some(first);
        let mut events = pool.cache.events().subscribe().unwrap();
        let known = look(&pool);
        thread.join().unwrap();
        follow(&pool, &mut events, known);
        if let Some(mut first) = first {
            follow_from_the_beginning(&pool, &mut first, 0);
        }
    });
}

#[test]
fn followed_after_another_while_a_block_is_stored() {
    follow_another("kv_events::followed_after_another_while_a_block_is_stored", false, false);
}

#[test]
fn followed_beside_another_while_a_block_is_stored() {
    follow_another("kv_events::followed_beside_another_while_a_block_is_stored", true, false);
}

#[test]
fn followed_beside_another_while_a_block_is_stored_again() {
    follow_another("kv_events::followed_beside_another_while_a_block_is_stored_again", true, true);
}

/// The block's sequence is closed while the block is being stored, and another thread needs its
/// frame.
#[test]
fn followed_while_a_stored_block_is_evicted() {
    check("kv_events::followed_while_a_stored_block_is_evicted", || {
        let pool = CachedBlocks::new(1);
        let block = pool.take_listed().expect("it is free");
        models::note(&pool.cache, block, CachedBlocks::hash(1));
        let (other, handle) = (pool.clone(), pool.blocks.handle(block));
        let thread = thread::spawn(move || models::register(&other.cache, &other.blocks, handle));
        let mut events = pool.cache.events().subscribe().unwrap();
        let known = look(&pool);
        pool.leave(block);
        pool.put(&pool.take(1).expect("it is free, or evictable"));
        thread.join().unwrap();
        follow(&pool, &mut events, known);
    });
}

/// A block is stored while its announcement is overwritten: the subscriber may receive the loss,
/// and look, before the block is cached.
#[test]
fn followed_while_a_stored_block_is_lost() {
    check("kv_events::followed_while_a_stored_block_is_lost", || {
        let pool = CachedBlocks::with_events(1, 2);
        let mut events = pool.cache.events().subscribe().unwrap();
        let publish = |pool: &CachedBlocks| {
            let removed = || KvEvent::Removed { block: BlockId(9), hash: CachedBlocks::hash(9), group: 0 };
            pool.cache.events().publish(removed)
        };
        publish(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.fill(1);
        });
        publish(&pool);
        let mut known = look(&pool);
        receive_all(&pool, &mut events, &mut known);
        thread.join().unwrap();
        follow(&pool, &mut events, known);
    });
}

/// A subscriber from the beginning: no block is removed that was not stored since the last clear,
/// and the numbers have no gap.
fn follow_from_the_beginning(pool: &CachedBlocks, events: &mut KvEvents, clears: usize) {
    let (mut known, mut number, mut cleared) = (BTreeSet::new(), 0, 0);
    while let Some(told) = events.try_recv() {
        assert_eq!(told.number, number, "{:?}", told.event);
        number += 1;
        match told.event {
            KvEvent::Stored { block, hash, .. } => drop(known.insert((block, hash))),
            KvEvent::Removed { block, hash, .. } => {
                assert!(known.remove(&(block, hash)), "already removed by a clear, or never stored");
            }
            KvEvent::Cleared => {
                known.clear();
                cleared += 1;
            }
            other => panic!("received {other:?}, which was not published"),
        }
    }
    assert_eq!((known, cleared), (look(pool), clears));
}

/// A thread registers a block that was noted, releases it and has it evicted, while another clears
/// the cache.
#[test]
fn cleared_while_a_block_is_stored_and_evicted() {
    check_wide(2, "kv_events::cleared_while_a_block_is_stored_and_evicted", || {
        let pool = CachedBlocks::with_events(1, 8);
        let mut events = pool.cache.events().subscribe().unwrap();
        let block = pool.take_listed().expect("it is free");
        models::note(&pool.cache, block, CachedBlocks::hash(1));
        let other = pool.clone();
        let thread = thread::spawn(move || {
            models::register(&other.cache, &other.blocks, other.blocks.handle(block));
            other.leave(block);
            other.put(&other.take(1).expect("it is free, or evictable"));
        });
        models::clear(&pool.cache);
        thread.join().unwrap();
        follow_from_the_beginning(&pool, &mut events, 1);
    });
}

/// A thread fills a block that it notes in the era before the clear, or in the one after, of which
/// it may be the first to report.
#[test]
fn stored_while_all_are_cleared() {
    check("kv_events::stored_while_all_are_cleared", || {
        let pool = CachedBlocks::with_events(1, 8);
        let mut events = pool.cache.events().subscribe().unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || models::clear(&other.cache));
        let block = pool.fill(1);
        thread.join().unwrap();
        follow_from_the_beginning(&pool, &mut events, 1);
        pool.leave(block);
        assert!(events.try_recv().is_none(), "a release is not an event");
    });
}

/// A thread that subscribes while another clears receives nothing that it cannot see, and learns of
/// every block stored afterwards.
#[test]
fn followed_while_all_are_cleared_and_one_is_stored() {
    subscribe_beside("kv_events::followed_while_all_are_cleared_and_one_is_stored", |pool| {
        pool.keep(1);
        models::clear(&pool.cache);
        pool.fill(2);
    });
}
