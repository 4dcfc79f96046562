//! A sequence that comes back into a full pool waits its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::{AdmitRequest, Preempt, SequenceId, Target};

use super::kv::{admit, is_idle, plain, pool, prompt};

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
    let back = host.migrate(swapped.sequence, Target::Device(&gpu)).await;
    let passed = admitted.load(Relaxed) - before;
    stop.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let (sequence, _) = back.unwrap_or_else(|error| panic!("refused after {:?}: {error}", began.elapsed()));
    assert!(passed <= 20, "{passed} admissions overtook it");
    drop(sequence);
    [gpu, host].iter().for_each(is_idle);
}
