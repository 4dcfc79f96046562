use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use smallvec::SmallVec;

use super::super::{BlockHash, ExtraKey};
use super::*;
use crate::ids::BlockId;

fn removed(block: u32) -> KvEvent {
    KvEvent::Removed { block: BlockId(block), hash: BlockHash::new(u128::from(block), 7), group: 0 }
}

fn block(event: &KvEvent) -> u32 {
    match event {
        KvEvent::Removed { block, .. } => block.0,
        other => panic!("{other:?}"),
    }
}

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
        group: 0,
        extra_keys: Box::new([(-1, ExtraKey::new(8..12, b"image"))]),
    };
    queue.publish(|| stored.clone());
    queue.publish(|| removed(3));
    queue.publish(|| KvEvent::Cleared);
    assert_eq!(drain(&mut events), [(0, stored), (1, removed(3)), (2, KvEvent::Cleared)]);
    assert_eq!(drain(&mut events), []);
}

#[test]
fn a_slow_subscriber_goes_on_in_the_middle() {
    let queue = EventQueue::new(3);
    assert_eq!(queue.capacity(), 4);
    let mut events = queue.subscribe().unwrap();
    (0..4).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(events.try_recv().unwrap().event, removed(0));
    (4..6).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!((queue.lost(), events.lag()), (0, 4), "no subscriber has met a loss");
    let want = [(1, KvEvent::Resync { lost: 3 }), (4, removed(4)), (5, removed(5))];
    assert_eq!(drain(&mut events), want);
    assert_eq!((queue.lost(), events.lag()), (3, 0));
    (6..10).for_each(|i| assert!(queue.publish(|| removed(i))));
    let want = [(6, removed(6)), (7, removed(7)), (8, removed(8)), (9, removed(9))];
    assert_eq!(drain(&mut events), want, "a whole ring is received, and the loss was reported once");
}

#[test]
fn a_publisher_knows_that_its_event_may_be_lost() {
    let queue = EventQueue::new(4);
    let mut events = queue.subscribe().unwrap();
    let position = queue.publish_to(ANY_ERA, 0..=1, || removed(0)).unwrap();
    queue.publish(|| removed(1));
    assert!(!queue.may_be_lost(position), "a reader keeps the newest two");
    (2..5).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert!(queue.may_be_lost(position));
    assert_eq!(events.try_recv().unwrap().event, KvEvent::Resync { lost: 3 });
}

#[test]
fn a_subscription_begins_anew() {
    let queue = EventQueue::new(2);
    let mut events = queue.subscribe().unwrap();
    (0..5).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(events.try_recv().unwrap().event, KvEvent::Resync { lost: 4 });
    drop(events);
    let mut events = queue.subscribe().unwrap();
    assert_eq!(drain(&mut events), [], "a new subscription starts empty, without earlier losses");
    (5..8).for_each(|i| assert!(queue.publish(|| removed(i))));
    assert_eq!(drain(&mut events), [(0, KvEvent::Resync { lost: 2 }), (2, removed(7))]);
}

/// A publisher that saw only earlier subscriptions publishes after they have ended.
#[test]
fn what_is_for_earlier_subscriptions_is_skipped() {
    let queue = EventQueue::new(8);
    drop(queue.subscribe().unwrap());
    let late = |i| {
        queue.push(Told { audience: 0..=1, era: ANY_ERA, event: removed(i) });
    };
    late(0);
    let mut events = queue.subscribe().unwrap();
    (1..4).for_each(late);
    queue.publish(|| removed(4));
    assert_eq!(events.lag(), 4);
    assert_eq!(drain(&mut events), [(0, removed(4))]);
}

#[test]
fn a_slow_subscriber_loses_alone() {
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
    assert_eq!(drain(&mut slow), [(0, KvEvent::Resync { lost: 4 }), (4, removed(4))]);
    assert_eq!(drain(&mut later), [(2, removed(3)), (3, removed(4))]);
    assert_eq!((drain(&mut fast), queue.lost()), (vec![], 4));
}

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

#[test]
fn an_event_goes_to_the_subscriptions_of_a_range() {
    let queue = EventQueue::new(4);
    let mut first = queue.subscribe().unwrap();
    let before = queue.subscriptions_now();
    let mut second = queue.subscribe().unwrap();
    let now = queue.subscriptions_now();
    assert!(queue.publish_to(ANY_ERA, before + 1..=now, || removed(1)).is_some());
    assert!(queue.publish_to(ANY_ERA, 0..=before, || removed(2)).is_some());
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

/// Sixty-four tasks each receive everything that two threads publish, in the same order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_subscribers_receive_everything() {
    const EACH: u32 = 300;
    let queue = EventQueue::new(2 * EACH as usize);
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let mut events = queue.subscribe().unwrap();
            tokio::spawn(async move {
                let mut received = Vec::new();
                while let Some(Numbered { number, event }) = events.recv().await {
                    assert_eq!(number, received.len() as u64);
                    received.push(block(&event));
                }
                received
            })
        })
        .collect();
    let publish = |from| (from..from + EACH).for_each(|i| assert!(queue.publish(|| removed(i))));
    std::thread::scope(|scope| {
        scope.spawn(|| publish(0));
        scope.spawn(|| publish(EACH));
    });
    drop(queue);
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.unwrap());
    }
    assert!(all.iter().all(|received| *received == all[0]), "in the same order");
    for from in [0, EACH] {
        let of_one = all[0].iter().copied().filter(|i| (from..from + EACH).contains(i));
        assert!(of_one.eq(from..from + EACH), "everything of each thread, in its order");
    }
}

/// Received and lost events add up to all; each thread's events, and losses, are in order.
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
    // Begins after a loss: the queue is meant to be too small.
    while queue.0.ring().unwrap().tail() <= 64 {
        tokio::task::yield_now().await;
    }
    let counters = Arc::clone(&queue.0);
    drop(queue);
    let (mut number, mut lost, mut last_resync) = (0, 0, 0);
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
    assert_eq!(counters.lost.load(Relaxed), lost);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
