use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use smallvec::SmallVec;

use super::super::{BlockHash, ExtraKey};
use super::*;
use crate::ids::BlockId;

fn removed(block: u32) -> KvEvent {
    KvEvent::Removed { block: BlockId(block), hash: BlockHash::new(u128::from(block), 7) }
}

fn block(event: &KvEvent) -> u32 {
    match event {
        KvEvent::Removed { block, .. } => block.0,
        other => panic!("{other:?}"),
    }
}

/// Returns all received numbers and events.
fn drain(events: &mut KvEvents) -> Vec<(u64, KvEvent)> {
    std::iter::from_fn(|| events.try_recv()).map(|event| (event.number, event.event)).collect()
}

#[test]
fn nobody_listens_and_no_event_is_made() {
    let queue = EventQueue::new(4);
    queue.publish(|| panic!("an event was constructed without a subscriber"));
    let events = queue.subscribe().unwrap();
    assert!(queue.is_subscribed());
    let other = queue.subscribe().unwrap();
    assert_eq!(queue.subscribers(), 2);
    drop(events);
    assert!(queue.is_subscribed(), "one of them is left");
    drop(other);
    queue.publish(|| panic!("an event was constructed without a subscriber"));
    drop(queue.subscribe().unwrap());
}

#[test]
fn events_come_in_order_and_whole() {
    let queue = EventQueue::new(8);
    let mut events = queue.subscribe().unwrap();
    let stored = KvEvent::Stored {
        block: BlockId(3),
        hash: BlockHash::new(1, 2),
        parent: Some(BlockHash::new(3, 4)),
        tokens: SmallVec::from_slice(&[1, 2, 3]),
        block_tokens: 3,
        extra_keys: Box::new([(-1, ExtraKey::new(8..12, b"image"))]),
    };
    queue.publish(|| stored.clone());
    queue.publish(|| removed(3));
    queue.publish(|| KvEvent::Cleared);
    assert_eq!(drain(&mut events), [(0, stored), (1, removed(3)), (2, KvEvent::Cleared)]);
    assert_eq!(drain(&mut events), []);
}

#[test]
fn a_full_queue_counts_what_it_loses() {
    let queue = EventQueue::new(3);
    assert_eq!(queue.capacity(), 4);
    let mut events = queue.subscribe().unwrap();
    (0..7).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(queue.lost(), 3);
    // Two are received, so two more find room: the loss lies between the old ones and these.
    assert_eq!(events.try_recv().unwrap().event, removed(0));
    assert_eq!(events.try_recv().unwrap().event, removed(1));
    (7..10).for_each(|i| assert!(queue.publish(|| removed(i))));
    let want = [
        (2, removed(2)),
        (3, removed(3)),
        (4, KvEvent::Resync { lost: 3 }),
        (7, removed(7)),
        (8, removed(8)),
        (9, KvEvent::Resync { lost: 1 }),
    ];
    assert_eq!(drain(&mut events), want);
    queue.publish(|| removed(10));
    assert_eq!(drain(&mut events), [(10, removed(10))], "reported once");
}

#[test]
fn a_subscription_begins_anew() {
    let queue = EventQueue::new(2);
    let mut events = queue.subscribe().unwrap();
    (0..5).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(events.try_recv().unwrap().event, removed(0));
    drop(events);
    let mut events = queue.subscribe().unwrap();
    assert_eq!(drain(&mut events), [], "a new subscription starts empty, without earlier losses");
    (5..8).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(drain(&mut events), [(0, removed(5)), (1, removed(6)), (2, KvEvent::Resync { lost: 1 })]);
}

/// A publisher that saw the last subscriber pushes after it has left.
#[test]
fn what_is_left_of_the_last_subscription_is_skipped() {
    let queue = EventQueue::new(2);
    drop(queue.subscribe().unwrap());
    let late = |i| Told::new(ANY_ERA, removed(i));
    for i in 0..5 {
        queue.0.slots().for_each(|slot| {
            slot.push(late(i));
        });
    }
    let mut events = queue.subscribe().unwrap();
    queue.publish(|| removed(5));
    assert_eq!(
        drain(&mut events),
        [(0, KvEvent::Resync { lost: 1 })],
        "late events fill the queue until they are skipped; the loss is reported"
    );
    queue.publish(|| removed(6));
    assert_eq!(drain(&mut events), [(1, removed(6))]);
}

/// A slow subscriber loses events and receives a resync; one that keeps up receives everything, and
/// one that came later what was published since.
#[test]
fn each_subscriber_has_its_own_lag() {
    let queue = EventQueue::new(2);
    let (mut slow, mut fast) = (queue.subscribe().unwrap(), queue.subscribe().unwrap());
    queue.publish(|| removed(0));
    assert_eq!(drain(&mut fast), [(0, removed(0))]);
    let mut later = queue.subscribe().unwrap();
    for i in 1..5 {
        queue.publish(|| removed(i));
        assert_eq!((fast.lag(), slow.lag()), (1, 2.min(u64::from(i) + 1)));
        assert_eq!(drain(&mut fast), [(u64::from(i), removed(i))]);
        if i == 2 {
            assert_eq!(drain(&mut later), [(0, removed(1)), (1, removed(2))]);
        }
    }
    assert_eq!(drain(&mut slow), [(0, removed(0)), (1, removed(1)), (2, KvEvent::Resync { lost: 3 })]);
    assert_eq!(drain(&mut later), [(2, removed(3)), (3, removed(4))]);
    assert_eq!((drain(&mut fast), queue.lost()), (vec![], 3));
}

/// The slot and the ring of a subscriber that left serve the next one.
#[test]
fn a_slot_is_used_again() {
    let queue = EventQueue::new(2);
    let first = queue.subscribe().unwrap();
    let mut second = queue.subscribe().unwrap();
    drop(first);
    let mut third = queue.subscribe().unwrap();
    assert_eq!(queue.0.slots().count(), 2);
    queue.publish(|| removed(1));
    assert_eq!(drain(&mut second), [(0, removed(1))]);
    assert_eq!(drain(&mut third), [(0, removed(1))]);
}

/// What one thread tells late to the subscriptions after the first does not reach the first.
#[test]
fn an_event_goes_to_the_subscriptions_of_a_range() {
    let queue = EventQueue::new(2);
    let mut first = queue.subscribe().unwrap();
    let before = queue.subscriptions_now();
    let mut second = queue.subscribe().unwrap();
    let now = queue.subscriptions_now();
    assert_eq!(queue.publish_to(ANY_ERA, before + 1..=now, || removed(1)), Published::ToAll);
    assert_eq!(queue.publish_to(ANY_ERA, ..=before, || removed(2)), Published::ToAll);
    assert_eq!(drain(&mut first), [(0, removed(2))]);
    assert_eq!(drain(&mut second), [(0, removed(1))]);
}

#[tokio::test]
async fn a_stream_waits_and_ends_with_the_queue() {
    let queue = EventQueue::new(8);
    let mut events = queue.subscribe().unwrap();
    let mut other = queue.subscribe().unwrap();
    let early = tokio::time::timeout(Duration::from_millis(5), events.recv()).await;
    assert!(early.is_err(), "no event was published yet");
    let publisher = tokio::spawn(async move {
        for i in 0..5 {
            tokio::task::yield_now().await;
            queue.publish(|| removed(i));
        }
    });
    let mut got = Vec::new();
    while let Some(event) = poll_fn(|context| Pin::new(&mut events).poll_next(context)).await {
        got.push(block(&event.event));
    }
    assert_eq!(got, [0, 1, 2, 3, 4]);
    assert_eq!(events.recv().await, None, "the stream stays ended");
    assert_eq!(drain(&mut other).len(), 5);
    assert_eq!(other.recv().await, None, "all streams end");
    publisher.await.unwrap();
}

/// Threads publish at full speed into a queue that is too small, while a task receives. Received
/// and lost events add up to all events, each thread's events come in order, and a loss is reported
/// after the events that precede it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_publish_while_a_task_receives() {
    const EACH: u32 = 20_000;
    let queue = Arc::new(EventQueue::new(64));
    let mut events = queue.subscribe().unwrap();
    let threads: Vec<_> = (0..2)
        .map(|thread| {
            let queue = queue.clone();
            std::thread::spawn(move || {
                (0..EACH).for_each(|i| assert!(queue.publish(|| removed(thread * EACH + i))))
            })
        })
        .collect();
    // Stop only after a loss: the queue is meant to be too small.
    while queue.lost() == 0 {
        tokio::task::yield_now().await;
    }
    drop(queue);
    let (mut number, mut lost, mut last_resync) = (0, 0, 0);
    // Per thread: the next event to publish, and the position of its last event.
    let mut threads_next = [(0, 0); 2];
    for time in 1.. {
        let Some(event) = events.recv().await else { break };
        assert_eq!(event.number, number);
        match event.event {
            KvEvent::Resync { lost: more } => {
                (lost, number, last_resync) = (lost + more, number + more, time);
            }
            event => {
                let (thread, i) = ((block(&event) / EACH) as usize, block(&event) % EACH);
                let (next, came) = threads_next[thread];
                assert!(i >= next, "thread {thread}: {i} after {next}");
                assert!(
                    i == next || last_resync > came,
                    "thread {thread}: the loss of {next}..{i} was not reported"
                );
                threads_next[thread] = (i + 1, time);
                number += 1;
            }
        }
    }
    assert_eq!(number, u64::from(2 * EACH));
    for (next, came) in threads_next {
        assert!(next == EACH || last_resync > came, "the loss of the last events was not reported");
    }
    assert!(lost > 0, "no event was lost");
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
