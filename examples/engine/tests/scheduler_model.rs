//! Models of the engine's scheduler: its workers, queue and cache as they are, over a pool without
//! storage, with a network that computes nothing. Theorem: workers serve all requests, also those
//! that together need more blocks than the pool has; no worker sleeps or turns for good, and all
//! blocks are free at the end. Run with loom:
//!
//! ```text
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" CARGO_TARGET_DIR=target/loom \
//!     cargo test --release -p kvpool-engine --test scheduler_model
//! ```

use kvpool::testing::{self, sync::Arc, thread};
use kvpool::{KvLayout, Pool};
use kvpool_engine::cache::KvCache;
use kvpool_engine::error::EngineError;
use kvpool_engine::model::{Network, Segment};
use kvpool_engine::paged::Paged;
use kvpool_engine::request::{Event, Job, Rank, Sampling};
use kvpool_engine::scheduler::Scheduler;
use kvpool_engine::worker::{Limits, Worker};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A network whose most probable token is always 0.
struct Constant;

impl Network for Constant {
    fn vocab(&self) -> usize {
        2
    }

    fn end(&self) -> Option<u32> {
        None
    }

    fn forward<C: KvCache>(
        &self,
        _: &C,
        _: &mut C::Step,
        segments: &mut [Segment<'_, C::Sequence>],
    ) -> Result<Vec<f32>, EngineError> {
        let rows: usize = segments.iter().map(|segment| segment.logits).sum();
        Ok([1.0, 0.0].repeat(rows))
    }
}

fn pool(blocks: usize) -> Pool {
    // Blocks of one token.
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(1).build().unwrap();
    let builder = Pool::builder(layout).blocks(blocks).segment_blocks(testing::SEGMENT_BLOCKS);
    builder.without_null_block().without_storage().magazine_blocks(0).build().unwrap()
}

fn job(arrival: u64, prompt: usize, tokens: usize) -> (Job, UnboundedReceiver<Event>) {
    let (events, stream) = unbounded_channel();
    let rank = Rank { can_wait: true, arrival, answer: 0 };
    let sampling = Sampling { temperature: 0.0, seed: 0 };
    let (tokens, tokens_max) = (vec![1; prompt], prompt + tokens);
    (Job { rank, tokens, tokens_max, forks: 0, sampling, drafts: 0, events }, stream)
}

/// Serves jobs of these numbers of prompt tokens and decoded tokens with two workers.
fn serve(blocks: usize, jobs: &[(usize, usize)]) {
    let pool = pool(blocks);
    let cache = Arc::new(Paged::new(pool.clone(), 1, 0, None));
    let scheduler = Arc::new(Scheduler::default());
    let mut streams = Vec::new();
    for (arrival, &(prompt, tokens)) in (1..).zip(jobs) {
        let (job, stream) = job(arrival, prompt, tokens);
        assert!(scheduler.submit(job));
        streams.push(stream);
    }
    scheduler.close();
    let worker = |scheduler: &Arc<Scheduler<_>>| {
        let limits = Limits { jobs: 1, step_tokens: 4 };
        Worker::new(cache.clone(), Arc::new(Constant), scheduler.clone(), limits)
    };
    let (first, second) = (worker(&scheduler), worker(&scheduler));
    let other = thread::spawn(move || second.run().unwrap());
    first.run().unwrap();
    other.join().unwrap();
    drop(scheduler);
    for (mut stream, &(_, tokens)) in streams.into_iter().zip(jobs) {
        for _ in 0..tokens {
            assert!(matches!(stream.try_recv(), Ok(Event::Token { token: 0, .. })));
        }
        assert!(matches!(stream.try_recv(), Ok(Event::Finished { .. })));
    }
    testing::end_exploring();
    testing::wait_for_threads(&pool, 0);
    pool.audit().unwrap();
    assert_eq!(pool.free_blocks(), blocks);
}

#[test]
fn two_requests_that_do_not_fit_together_are_served() {
    // Each needs both blocks in the end: one of them is preempted, and computed again.
    let check = testing::Check::new("two requests that do not fit together").preemptions(1);
    check.run(|| serve(2, &[(1, 2), (1, 2)]));
}

#[test]
fn a_request_waits_for_the_blocks_of_another() {
    let check = testing::Check::new("a request waits for the blocks of another").preemptions(1);
    check.run(|| serve(1, &[(1, 1), (1, 1)]));
}

/// Theorem: a request that arrives while the worker goes to sleep wakes it.
#[test]
fn a_request_is_served_when_it_arrives() {
    testing::Check::new("a request is served when it arrives").preemptions(2).run(|| {
        let pool = pool(1);
        let scheduler = Arc::new(Scheduler::default());
        let limits = Limits { jobs: 1, step_tokens: 4 };
        let cache = Arc::new(Paged::new(pool.clone(), 1, 0, None));
        let worker = Worker::new(cache, Arc::new(Constant), scheduler.clone(), limits);
        let worker = thread::spawn(move || worker.run().unwrap());
        let (job, mut stream) = job(1, 1, 1);
        assert!(scheduler.submit(job));
        // The scheduler is closed only afterwards, since that wakes the worker too.
        while !stream.is_closed() {
            thread::yield_now();
        }
        assert!(matches!(stream.try_recv(), Ok(Event::Token { token: 0, .. })));
        assert!(matches!(stream.try_recv(), Ok(Event::Finished { .. })));
        scheduler.close();
        worker.join().unwrap();
        testing::end_exploring();
        testing::wait_for_threads(&pool, 0);
        pool.audit().unwrap();
    });
}
