//! A sequence that comes back into a full pool waits its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Pool, Preempt, Priority, ResumeOptions, SequenceError,
    SequenceId, TransferError,
};

use super::kv::{admit, builder, check, config, is_idle, plain, pool, prompt};

/// Six tasks admit sequences of four blocks all the time, and leave no room. A swapped one of four
/// blocks gets in within a few turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swapped_sequence_gets_in_beside_admissions() {
    let (gpu, host) = (pool(plain(), 16), pool(plain(), 100));
    let tokens = prompt(99, 16);
    let sequence = admit(&gpu, 1 << 40, &tokens).unwrap();
    let swapped = gpu.preempt(sequence, Preempt::Swap(&host)).await.unwrap().swapped.unwrap();
    let (stop, admitted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let tasks: Vec<_> = (0..6u32)
        .map(|task| {
            let (gpu, stop, admitted) = (gpu.clone(), stop.clone(), admitted.clone());
            tokio::spawn(async move {
                for turn in 0.. {
                    if stop.load(Relaxed) {
                        return;
                    }
                    let tokens = prompt(task * 100 + turn % 100, 16);
                    let request = AdmitRequest::new(SequenceId(task.into()), &tokens);
                    let sequence = gpu.admit_async(&request).await.unwrap();
                    admitted.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    drop(sequence);
                }
            })
        })
        .collect();
    while admitted.load(Relaxed) < 20 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (before, began) = (admitted.load(Relaxed), Instant::now());
    let back = gpu.resume(&swapped.sequence, ResumeOptions::new()).await;
    let passed = admitted.load(Relaxed) - before;
    stop.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let (sequence, _) = back.unwrap_or_else(|error| panic!("refused after {:?}: {error}", began.elapsed()));
    assert!(passed <= 20, "{passed} admissions overtook it");
    drop((sequence, swapped));
    [gpu, host].iter().for_each(is_idle);
}

/// At the deadline the sequence comes back unchanged, and the queue is empty.
#[tokio::test]
async fn a_deadline_returns_the_sequence() {
    let (gpu, host) = (pool(plain(), 16), pool(plain(), 100));
    let tokens = prompt(1, 16);
    let sequence = admit(&host, 7, &tokens).unwrap();
    let held = gpu.allocate(AllocRequest::new(13)).unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(20)] {
        let (began, copy) = (Instant::now(), sequence.fork(SequenceId(8)).unwrap());
        let failed = host.migrate(copy, &gpu).until(began + wait).await.unwrap_err();
        assert!(began.elapsed() >= wait);
        let TransferError::Alloc(AllocError::Deadline { asked: 4, free: 3, head: None, .. }) = failed.error
        else {
            panic!("{failed}")
        };
        assert_eq!((failed.sequence.id(), failed.sequence.len()), (SequenceId(8), 16));
        check(&host, &failed.sequence, &tokens);
        assert_eq!((gpu.stats().waiting, gpu.sequence_count(), gpu.free_blocks()), (0, 0, 3));
    }
    // In time.
    let soon = Instant::now() + Duration::from_secs(20);
    let (back, ()) = tokio::join!(host.migrate(sequence, &gpu).until(soon), async { drop(held) });
    let (sequence, _) = back.unwrap();
    check(&gpu, &sequence, &tokens);
    drop(sequence);
    [gpu, host].iter().for_each(is_idle);
}

/// Polls once.
fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.poll(&mut context) {
        std::task::Poll::Ready(outcome) => Some(outcome),
        std::task::Poll::Pending => None,
    }
}

/// A future that is dropped in the queue leaves nothing behind, and the sequence is closed.
#[test]
fn a_dropped_future_leaves_the_line() {
    let (gpu, host) = (pool(plain(), 16), pool(plain(), 100));
    let held = gpu.allocate(AllocRequest::new(14)).unwrap();
    // Two of its blocks are cached there; they stay in their places while it waits.
    drop(admit(&gpu, 1, &prompt(1, 8)).unwrap());
    for polls in 0..4 {
        let sequence = admit(&host, 7, &prompt(1, 16)).unwrap();
        let mut migration = Box::pin(host.migrate(sequence, &gpu).into_future());
        for _ in 0..polls {
            assert!(poll(migration.as_mut()).is_none());
            assert_eq!((gpu.stats().waiting, gpu.stats().evictable, gpu.stats().used), (1, 2, 14));
            assert!(gpu.view(SequenceId(7)).is_some(), "its id is open");
        }
        drop(migration);
        assert_eq!((gpu.stats().waiting, gpu.sequence_count(), host.sequence_count()), (0, 0, 0));
        is_idle(&host);
    }
    drop(held);
    is_idle(&gpu);
}

/// What can never fit is refused at once.
#[tokio::test]
async fn a_sequence_that_is_larger_than_the_pool() {
    let (gpu, host) = (pool(plain(), 64), pool(plain(), 200));
    let big = admit(&host, 7, &prompt(1, 65 * 4)).unwrap();
    let failed = host.migrate(big, &gpu).await.unwrap_err();
    assert_eq!(failed.error, TransferError::Alloc(AllocError::TooLarge { asked: 65, total: 64 }));
    drop(failed);
    let reserved = builder(plain(), 64).prefix_cache(config()).reserve(10).build().unwrap();
    let big = admit(&host, 7, &prompt(1, 55 * 4)).unwrap();
    let failed = host.migrate(big, &reserved).await.unwrap_err();
    let want = AllocError::Reserved { asked: 55, total: 64, reserve: 10 };
    assert_eq!(failed.error, TransferError::Alloc(want));
    drop(failed);
    assert_eq!((reserved.free_blocks(), reserved.sequence_count()), (54, 0));
    [gpu, host].iter().for_each(is_idle);
}

/// Before an admission of its priority that came first, and after one of higher priority that came
/// last. Nothing that does not wait gets its blocks.
#[tokio::test]
async fn it_comes_before_admissions_of_its_priority() {
    let (gpu, host) = (pool(plain(), 16), pool(plain(), 100));
    let mut held = gpu.allocate_owned(AllocRequest::new(16)).unwrap();
    let tokens = [prompt(1, 16), prompt(2, 16), prompt(3, 16)];
    let requests = [
        AdmitRequest::new(SequenceId(2), &tokens[1]),
        AdmitRequest::new(SequenceId(3), &tokens[2]).priority(Priority::High),
    ];
    let mut normal = Box::pin(gpu.admit_async(&requests[0]).into_future());
    assert!(poll(normal.as_mut()).is_none());
    let sequence = admit(&host, 1, &tokens[0]).unwrap();
    let mut back = Box::pin(host.migrate(sequence, &gpu).into_future());
    assert!(poll(back.as_mut()).is_none());
    let mut high = Box::pin(gpu.admit_async(&requests[1]).into_future());
    assert!(poll(high.as_mut()).is_none());
    held.truncate(12);
    let refused = gpu.admit(&AdmitRequest::new(SequenceId(4), &tokens[1][..1])).unwrap_err();
    assert!(matches!(refused, SequenceError::Alloc(AllocError::Behind { .. })), "{refused}");
    let other = admit(&host, 5, &prompt(5, 4)).unwrap();
    let late = host.migrate(other, &gpu).until(Instant::now()).await.unwrap_err();
    assert!(matches!(late.error, TransferError::Alloc(AllocError::Deadline { .. })), "{late}");
    assert!(poll(normal.as_mut()).is_none() && poll(back.as_mut()).is_none());
    let high = poll(high.as_mut()).expect("four blocks are free").unwrap();
    held.truncate(8);
    assert!(poll(normal.as_mut()).is_none());
    let (back, report) = poll(back.as_mut()).expect("four blocks are free").unwrap();
    assert_eq!(report.carried.blocks, 4);
    check(&gpu, &back, &tokens[0]);
    drop(held);
    let normal = poll(normal.as_mut()).expect("eight blocks are free").unwrap();
    drop((high, back, normal, late));
    [&gpu, &host].iter().for_each(|pool| is_idle(pool));
}

/// Cached blocks of the sequence that come and go while it waits.
#[tokio::test]
async fn the_prefix_is_looked_up_in_each_turn() {
    let (gpu, host) = (pool(plain(), 16), pool(plain(), 100));
    let tokens = prompt(1, 33);
    let mut held = gpu.allocate_owned(AllocRequest::new(11)).unwrap();
    let sequence = admit(&host, 1, &tokens).unwrap();
    let mut back = Box::pin(host.migrate(sequence, &gpu).into_future());
    assert!(poll(back.as_mut()).is_none());
    // Three blocks that it needs are computed there meanwhile, and then two are free.
    drop(admit(&gpu, 2, &tokens[..12]).unwrap());
    assert_eq!((gpu.stats().free, gpu.stats().evictable), (2, 3));
    assert!(poll(back.as_mut()).is_none());
    assert_eq!((gpu.stats().free, gpu.stats().evictable), (2, 3));
    held.truncate(7);
    let (back, report) = poll(back.as_mut()).expect("six are free").unwrap();
    assert_eq!((report.shared_blocks, report.carried.blocks), (3, 6));
    check(&gpu, &back, &tokens);
    drop(held);
    drop(back);
    [&gpu, &host].iter().for_each(|pool| is_idle(pool));
}

/// Swaps have counters of their own, and so have refusals.
#[tokio::test]
async fn swaps_are_counted() {
    let (gpu, host, small) = (pool(plain(), 16), pool(plain(), 100), pool(plain(), 2));
    let counts = |pool: &Pool| pool.metrics().migrations.unwrap();
    let sequence = admit(&gpu, 7, &prompt(1, 16)).unwrap();
    let refused = gpu.preempt(sequence, Preempt::Swap(&small)).await.unwrap_err();
    let too_large = AllocError::TooLarge { asked: 4, total: 2 };
    assert_eq!(refused.error, TransferError::Alloc(too_large));
    assert_eq!((counts(&gpu).refused, counts(&gpu).failed, counts(&gpu).swapped_out), (1, 0, 0));
    let swapped = gpu.preempt(*refused.sequence, Preempt::Swap(&host)).await.unwrap().swapped.unwrap();
    let (went, blocks) = (counts(&gpu), counts(&gpu).blocks);
    assert_eq!((went.swapped_out, went.replicated, went.migrated, blocks), (1, 0, 0, 4));
    // Over a third pool, and back.
    let failed = host.migrate(swapped.sequence, &small).await.unwrap_err();
    assert_eq!((counts(&host).refused, counts(&host).failed), (1, 0));
    let third = pool(plain(), 50);
    let (sequence, _) = host.migrate(*failed.sequence, &third).await.unwrap();
    let (sequence, _) = third.migrate(sequence, &gpu).await.unwrap();
    assert_eq!((counts(&host).migrated, counts(&third).migrated), (1, 1));
    // Resumed, it counts as swapped in.
    let swapped = gpu.preempt(sequence, Preempt::Swap(&host)).await.unwrap().swapped.unwrap().sequence;
    drop(gpu.resume(&swapped, ResumeOptions::new()).await.unwrap());
    drop(swapped);
    assert_eq!((counts(&host).migrated, counts(&host).swapped_in), (1, 1));
    [gpu, host, small, third].iter().for_each(is_idle);
}

/// A refused request tells how many blocks are in transfer: they come back without a preemption.
#[test]
fn a_refusal_names_the_blocks_in_transfer() {
    let gpu = pool(plain(), 16);
    let refused = || gpu.allocate(AllocRequest::new(16)).unwrap_err();
    let in_transfer = |error: &AllocError| match error {
        AllocError::Exhausted { in_transfer, .. } => *in_transfer,
        error => panic!("{error}"),
    };
    let [one, two] = [1, 2].map(|id| admit(&gpu, id, &prompt(id as u32, 16)).unwrap());
    assert_eq!(in_transfer(&refused()), 0);
    let first = gpu.export(one).unwrap();
    let second = gpu.export_copy(&two).unwrap();
    assert_eq!(in_transfer(&refused()), 8);
    assert_eq!(gpu.stats().in_transfer, 8);
    assert!(refused().to_string().contains("8 in transfer"), "{}", refused());
    let _ = first.finish();
    assert_eq!(in_transfer(&refused()), 4);
    drop(second);
    assert_eq!(in_transfer(&refused()), 0);
    drop(two);
    is_idle(&gpu);
}
