//! A scheduler with several workers on one pool: no admitted sequence lacks blocks for its prompt,
//! while requests come with deadlines and the pool is resized.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, AllocError, Append, Pool, Priority, Sequence, SequenceError, SequenceId, StepError, Tokens,
};
use tokio::time::sleep;

use super::{quiet, soon};

const REQUESTS: u64 = 600;
const BLOCKS: usize = 400;

#[derive(Default)]
struct Tally {
    next: AtomicU64,
    completed: AtomicUsize,
    late: AtomicUsize,
    preempted: AtomicUsize,
    first_append_failures: AtomicUsize,
}

/// A sequence that runs, and how many tokens it still generates.
struct Running {
    sequence: Sequence,
    left: usize,
    text: Vec<u32>,
}

struct Worker {
    pool: Pool,
    tally: Arc<Tally>,
    rng: Rng,
    running: Vec<Running>,
    /// Requests that were preempted: their ids, tokens so far, and tokens left.
    again: VecDeque<(SequenceId, Vec<u32>, usize)>,
}

impl Worker {
    async fn run(mut self) {
        loop {
            self.admit().await;
            if self.running.is_empty() && self.again.is_empty() && self.tally.next.load(Relaxed) >= REQUESTS {
                return;
            }
            self.step();
            tokio::task::yield_now().await;
        }
    }

    fn next(&mut self) -> Option<(SequenceId, Vec<u32>, usize)> {
        if let Some(again) = self.again.pop_front() {
            return Some(again);
        }
        let id = self.tally.next.fetch_add(1, Relaxed);
        (id < REQUESTS).then(|| {
            let tokens = self.rng.usize(5..600);
            let shared = self.rng.u32(..4);
            let text =
                (0..tokens as u32).map(|token| if token < 64 { shared } else { id as u32 } << 16 | token);
            (SequenceId(id), text.collect(), self.rng.usize(1..60))
        })
    }

    async fn admit(&mut self) {
        if self.running.len() >= 8 {
            return;
        }
        let Some((id, text, left)) = self.next() else { return };
        let priority = [Priority::Normal, Priority::High][self.rng.usize(..2)];
        let request = AdmitRequest::new(id, &text).priority(priority).headroom(self.rng.usize(..20));
        let outcome = if self.running.is_empty() {
            // Nothing else to do: wait, but not forever.
            self.pool.admit_async(&request).until(Instant::now() + Duration::from_millis(500)).await
        } else {
            self.pool.admit(&request)
        };
        match outcome {
            Ok(mut sequence) => {
                let mut batch = self.pool.begin_batch();
                if batch.append(&mut sequence, Tokens::Announced(text.len())).is_err() {
                    self.tally.first_append_failures.fetch_add(1, Relaxed);
                }
                self.running.push(Running { sequence, left, text });
                batch.finish();
            }
            Err(SequenceError::Alloc(AllocError::Deadline { .. })) => {
                self.tally.late.fetch_add(1, Relaxed);
                self.again.push_back((id, text, left));
            }
            Err(SequenceError::Alloc(
                AllocError::Behind { .. } | AllocError::Exhausted { .. } | AllocError::TooLarge { .. },
            )) => self.again.push_back((id, text, left)),
            Err(error) => panic!("{error}"),
        }
    }

    fn step(&mut self) {
        let mut batch = self.pool.begin_batch();
        while !self.running.is_empty() {
            let tokens: Vec<u32> = self.running.iter().map(|running| running.left as u32).collect();
            let running = self.running.iter_mut().zip(&tokens);
            let mut step: Vec<Append> = running
                .map(|(running, token)| Append::new(&mut running.sequence, std::slice::from_ref(token)))
                .collect();
            match batch.step(&mut step) {
                Ok(_) => {
                    for (running, token) in self.running.iter_mut().zip(tokens) {
                        running.text.push(token);
                        running.left -= 1;
                    }
                    break;
                }
                Err(StepError::Lacking { sequences, .. }) => {
                    assert!(!sequences.is_empty());
                    // The youngest one gives way, and is computed again later.
                    let victim = self.running.pop().unwrap();
                    self.again.push_back((victim.sequence.id(), victim.text, victim.left));
                    self.tally.preempted.fetch_add(1, Relaxed);
                }
                Err(error) => panic!("{error}"),
            }
        }
        batch.finish();
        let before = self.running.len();
        self.running.retain(|running| running.left > 0);
        self.tally.completed.fetch_add(before - self.running.len(), Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_admitted_sequence_fails_its_first_append() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout).blocks(BLOCKS).prefix_cache(PrefixConfig::new()).build().unwrap();
    let tally = Arc::new(Tally::default());
    let workers: Vec<_> = (0..4)
        .map(|seed| {
            let (pool, tally, rng) = (pool.clone(), tally.clone(), Rng::with_seed(seed));
            tokio::spawn(Worker { pool, tally, rng, running: Vec::new(), again: VecDeque::new() }.run())
        })
        .collect();
    let resizing = {
        let pool = pool.clone();
        tokio::spawn(async move {
            let (mut rng, mut resizes) = (Rng::with_seed(9), 0);
            loop {
                sleep(Duration::from_millis(3)).await;
                // A shrink below the blocks in use is refused.
                resizes += u32::from(pool.resize(rng.usize(BLOCKS / 2..=BLOCKS)).await.is_ok());
                if resizes == u32::MAX {
                    return;
                }
            }
        })
    };
    soon(async {
        for worker in workers {
            worker.await.unwrap();
        }
    })
    .await;
    resizing.abort();
    let _ = resizing.await;
    let Tally { completed, late, preempted, first_append_failures, .. } = &*tally;
    println!(
        "{} completed, {} preempted, {} deadlines missed, {} first appends failed",
        completed.load(Relaxed),
        preempted.load(Relaxed),
        late.load(Relaxed),
        first_append_failures.load(Relaxed)
    );
    assert_eq!(completed.load(Relaxed), REQUESTS as usize);
    assert_eq!(first_append_failures.load(Relaxed), 0);
    quiet(&pool);
}
