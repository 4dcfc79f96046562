//! The order of admissions, reservations and appends: by priority; running sequences first within
//! each; and in order of arrival.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

use fastrand::Rng;
use kvpool::{AdmitRequest, AllocError, AllocRequest, Priority, SequenceError, SequenceId};
use kvpool_testkit::steps::append;
use tokio::time::{Instant, sleep};

use super::{LIMIT, plain, poll_once, quiet, request, soon};

/// An urgent request for most of the pool, beside tasks that open and append all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_urgent_admission_does_not_starve_beside_appends() {
    let pool = plain(100);
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..16u64)
        .map(|task| {
            let (pool, stop) = (pool.clone(), stop.clone());
            tokio::spawn(async move {
                let (mut rng, mut refused) = (Rng::with_seed(task), 0);
                while !stop.load(Relaxed) {
                    let id = SequenceId(1_000 + task);
                    let mut sequence = pool.sequence(id).open().unwrap();
                    for _ in 0..rng.usize(1..8) {
                        let mut batch = pool.begin_batch();
                        match batch.append(&mut sequence, rng.usize(1..20)) {
                            Ok(_) => {}
                            Err(SequenceError::Alloc(
                                AllocError::Behind { .. } | AllocError::Exhausted { .. },
                            )) => refused += 1,
                            Err(error) => panic!("{error}"),
                        }
                        batch.finish();
                        tokio::task::yield_now().await;
                    }
                }
                refused
            })
        })
        .collect();
    let mut waits = Vec::new();
    for round in 0..20 {
        sleep(Duration::from_millis(5)).await;
        let began = Instant::now();
        let prompt = [1; 60 * 4];
        let urgent = AdmitRequest::new(SequenceId(round), &prompt).priority(Priority::Urgent);
        let sequence = soon(pool.admit_async(&urgent)).await.unwrap();
        waits.push(began.elapsed());
        drop(sequence);
    }
    stop.store(true, Relaxed);
    let mut refused = 0;
    for task in tasks {
        refused += task.await.unwrap();
    }
    let longest = waits.iter().max().unwrap();
    println!("20 urgent admissions waited {longest:?} at most; {refused} appends were refused meanwhile");
    assert!(*longest < LIMIT, "{waits:?}");
    quiet(&pool);
}

#[tokio::test]
async fn appends_follow_higher_priorities_only() {
    let pool = plain(20);
    let mut low = pool.sequence(SequenceId(1)).open().unwrap();
    let mut same = pool.sequence(SequenceId(2)).priority(Priority::High).open().unwrap();
    let held = pool.allocate_owned(AllocRequest::new(10)).unwrap();
    let prompt = [1; 60];
    let wanted = request(3, &prompt).priority(Priority::High);
    let mut waiting = pin!(pool.admit_async(&wanted).into_future());
    assert!(poll_once(waiting.as_mut()).is_pending());
    let mut batch = pool.begin_batch();
    let refused = batch.append(&mut low, 4).unwrap_err();
    let behind =
        AllocError::Behind { asked: 1, priority: Priority::Normal, waiting: Priority::High, lacking: 5 };
    assert_eq!(refused, SequenceError::Alloc(behind));
    assert_eq!(low.reserve(4).unwrap_err(), SequenceError::Alloc(behind));
    batch.append(&mut same, 4).unwrap();
    batch.append(&mut same, 12).unwrap();
    assert!(pool.allocate(AllocRequest::new(1)).is_ok(), "a lease is outside of the line");
    batch.finish();
    drop((same, held));
    let admitted = soon(waiting).await.unwrap();
    append(&pool, &mut low, 4);
    drop((admitted, low));
    quiet(&pool);
}

/// A head that is woken and not polled does not hold up appends for longer than the patience.
#[tokio::test]
async fn an_admission_that_is_not_polled_is_passed_over_by_appends() {
    let pool = plain(20);
    let mut low = pool.sequence(SequenceId(1)).open().unwrap();
    let held = pool.allocate_owned(AllocRequest::new(20)).unwrap();
    let prompt = [1; 60];
    let wanted = request(3, &prompt).priority(Priority::Urgent);
    let mut waiting = Box::pin(pool.admit_async(&wanted).into_future());
    assert!(poll_once(waiting.as_mut()).is_pending());
    drop(held);
    assert!(matches!(
        pool.begin_batch().append(&mut low, 4),
        Err(SequenceError::Alloc(AllocError::Behind { .. }))
    ));
    sleep(Duration::from_millis(150)).await;
    append(&pool, &mut low, 4);
    let admitted = soon(waiting).await.unwrap();
    drop((admitted, low));
    quiet(&pool);
}

/// A seeded storm of waiting requests: each grant goes to the first in the documented order of
/// those that wait.
#[tokio::test]
async fn grants_follow_the_documented_order() {
    for seed in 0..40 {
        let mut rng = Rng::with_seed(seed);
        let pool = plain(12);
        let mut running: Vec<_> = (0..4u64)
            .map(|id| {
                let priority = [Priority::Normal, Priority::High, Priority::Urgent][id as usize % 3];
                Some(pool.sequence(SequenceId(100 + id)).priority(priority).open().unwrap())
            })
            .collect();
        let held = pool.allocate_owned(AllocRequest::new(12)).unwrap();
        let prompts: Vec<Vec<u32>> = (0..12).map(|_| vec![1; rng.usize(1..40)]).collect();
        let requests: Vec<(Priority, AdmitRequest<'_>)> = prompts
            .iter()
            .zip(0u64..)
            .map(|(prompt, id)| {
                let priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
                (priority, request(id, prompt).priority(priority))
            })
            .collect();
        let granted = std::cell::RefCell::new(Vec::new());
        let mut expected = Vec::new();
        let mut waiting: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        let mut growing: Vec<_> = running.iter_mut().filter_map(Option::take).collect();
        for (place, (priority, request)) in requests.iter().enumerate() {
            if place % 3 == 1
                && let Some(mut sequence) = growing.pop()
            {
                let (pool, granted) = (&pool, &granted);
                expected.push((std::cmp::Reverse(sequence.priority()), 0, place, 100 + place));
                waiting.push(Box::pin(async move {
                    pool.reserve_async(&mut sequence, 4).await.unwrap();
                    granted.borrow_mut().push(100 + place);
                }));
            }
            let (pool, granted) = (&pool, &granted);
            expected.push((std::cmp::Reverse(*priority), 1, place, place));
            waiting.push(Box::pin(async move {
                let sequence = pool.admit_async(request).await.unwrap();
                granted.borrow_mut().push(place);
                drop(sequence);
            }));
        }
        for future in &mut waiting {
            assert!(poll_once(future.as_mut()).is_pending());
        }
        drop(held);
        soon(async {
            while !waiting.is_empty() {
                waiting.retain_mut(|future| poll_once(future.as_mut()).is_pending());
                tokio::task::yield_now().await;
            }
        })
        .await;
        expected.sort_unstable();
        let expected: Vec<usize> = expected.into_iter().map(|(.., name)| name).collect();
        assert_eq!(*granted.borrow(), expected, "seed {seed}");
        drop((waiting, growing));
        quiet(&pool);
    }
}
