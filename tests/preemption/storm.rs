//! Workers with overlapping batches that swap sequences out and in while others compute.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use kvpool::{AllocRequest, LowestPriorityFirst, Pool, Preempt, Sequence, SequenceId, TransferError};

use super::far;
use super::kv::{check, extend, is_idle, other, plain, pool, prompt};

/// What the workers did together.
#[derive(Default)]
struct Done {
    swaps: AtomicUsize,
    closes: AtomicUsize,
    waits: AtomicUsize,
}

/// No swap is refused because of a batch: neither of another worker, nor, because it waits, of its
/// own. No byte is lost, and both pools add up afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_swap_is_refused_because_of_a_batch() {
    let (from, host) = (pool(plain(), 120), pool(other(), 400));
    let (done, stop) = (Arc::new(Done::default()), Arc::new(AtomicBool::new(false)));
    // A worker whose batches are long, and write to none of the others' sequences.
    let long = tokio::spawn({
        let (from, stop) = (from.clone(), stop.clone());
        async move {
            while !stop.load(Relaxed) {
                let batch = from.begin_batch();
                drop(from.allocate(AllocRequest::new(2)));
                tokio::time::sleep(Duration::from_millis(3)).await;
                batch.finish();
            }
        }
    });
    let onlooker = tokio::spawn({
        let (from, stop) = (from.clone(), stop.clone());
        async move {
            while !stop.load(Relaxed) {
                for victim in from.victims(&LowestPriorityFirst) {
                    let kinds = victim.freed_blocks + victim.cached_blocks + victim.shared_blocks;
                    assert_eq!(victim.blocks, kinds);
                }
                tokio::task::yield_now().await;
            }
        }
    });
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (from, host, done) = (from.clone(), host.clone(), done.clone());
            tokio::spawn(async move { work(worker, &from, &host, &done).await })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    stop.store(true, Relaxed);
    long.await.unwrap();
    onlooker.await.unwrap();
    assert!(done.swaps.load(Relaxed) > 20 && done.closes.load(Relaxed) > 10, "{:?}", done.swaps);
    assert!(done.waits.load(Relaxed) > 10);
    // The tasks that end batches may still run.
    from.settled_up_to(from.blocks().clock().newest()).until(far()).await.unwrap();
    assert_eq!(from.blocks().clock().waiting_for_ends(), 0);
    [from, host].iter().for_each(is_idle);
}

async fn work(worker: u32, from: &Pool, host: &Pool, done: &Done) {
    let mut rng = fastrand::Rng::with_seed(u64::from(worker));
    for round in 0..120 {
        let id = SequenceId(u64::from(worker * 1000 + round));
        let tokens = prompt(worker * 100 + round % 7, rng.usize(4..60));
        let Ok(mut sequence) = from.sequence(id).tokens(&tokens) else { continue };
        while sequence.len() < tokens.len() {
            let (began, most) = (sequence.len(), (sequence.len() + rng.usize(1..9)).min(tokens.len()));
            let mut batch = from.begin_batch();
            if extend(&mut batch, &mut sequence, &tokens[began..most]).is_err() {
                break;
            }
            // The batch ends elsewhere, later.
            let end = tokio::spawn(async move {
                tokio::task::yield_now().await;
                batch.finish();
            });
            match rng.u32(..6) {
                0 => sequence = swap(sequence, from, host, done, &tokens).await,
                1 => {
                    let settled = from.settled(&sequence);
                    done.waits.fetch_add(1, Relaxed);
                    settled.await.unwrap();
                }
                2 => drop(tokio::time::timeout(Duration::ZERO, from.settled(&sequence)).await),
                _ => {}
            }
            if rng.bool() {
                end.await.unwrap();
            }
        }
        let target = host;
        drop(tokio::time::timeout(Duration::ZERO, from.replicate(&sequence, target).until(far())).await);
        if rng.bool() {
            done.closes.fetch_add(1, Relaxed);
            let length = sequence.len();
            let closed = from.preempt(sequence, Preempt::Recompute).await.unwrap();
            assert_eq!(closed.tokens_kept + closed.tokens_lost, length);
        }
    }
}

/// Swaps a sequence out and in again, and checks its bytes on both sides.
async fn swap(sequence: Sequence, from: &Pool, host: &Pool, done: &Done, tokens: &[u32]) -> Sequence {
    let there = match from.preempt(sequence, Preempt::Swap(host)).until(far()).await {
        Ok(preempted) => preempted.swapped.unwrap().sequence,
        Err(error) => panic!("{error}"),
    };
    done.swaps.fetch_add(1, Relaxed);
    check(host, &there, tokens);
    let mut there = there;
    loop {
        match host.migrate(there, from).until(far()).await {
            Ok((back, _)) => {
                check(from, &back, tokens);
                return back;
            }
            // Others have the blocks at the moment.
            Err(error) if matches!(error.error, TransferError::Alloc(_)) => {
                there = *error.sequence;
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}
