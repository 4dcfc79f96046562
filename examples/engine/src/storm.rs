//! The seeded storm: the same requests to the paged engine and to the contiguous reference, while
//! the pool of the first is compacted and resized; every token and every logit is compared.

use std::time::{Duration, Instant};

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::testing::{sync::Arc, wait_for_threads};
use kvpool::{DefragConfig, DefragError, Pool, ResizeOptions};
use serde::Serialize;
use tokio::sync::{mpsc::UnboundedReceiver, watch};

use crate::cache::{CacheCounts, KvCache};
use crate::contiguous::Contiguous;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::model::Model;
use crate::paged::Paged;
use crate::preempt::Swap;
use crate::request::{Event, Request, Sampling};
use crate::scheduler::Counts;
use crate::worker::Limits;

/// Tokens to decode for which an admission takes room.
const HEADROOM: usize = 8;

/// Parameters of a storm.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    /// Seed of the requests, and of the pool's resizes.
    pub seed: u64,
    /// Number of requests.
    pub requests: usize,
    /// Worker threads.
    pub workers: usize,
    /// Contiguous caches that fill the memory; the pool has as many bytes.
    pub slots: usize,
    /// Maximum length of a sequence.
    pub tokens_max: usize,
    /// Tokens per block of the pool.
    pub block_tokens: usize,
    /// Maximum number of tokens computed per step of a worker, apart from drafts.
    pub step_tokens: usize,
    /// Whether the pool is compacted and resized meanwhile.
    pub has_chaos: bool,
}

/// A request of a storm, and when its client cancels it.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The request.
    pub request: Request,
    /// Number of tokens after which the client drops the stream.
    pub cancel_after: Option<usize>,
}

/// Tokens and digests of the logits, by answer.
pub type Answers = Vec<Vec<(u32, u64)>>;

/// What one client received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// The answers, as far as they were received.
    pub answers: Answers,
    /// Number of answers that were finished.
    pub finished: usize,
}

/// Counts of what happened to the pool meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the printed report")]
pub struct ChaosCounts {
    pub moved_blocks: usize,
    pub resizes: usize,
    pub resizes_refused: usize,
}

/// Outcome of a storm, as it is printed.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the printed report")]
pub struct Report {
    pub requests: usize,
    pub completed: usize,
    pub cancelled: usize,
    pub tokens: usize,
    pub tokens_wrong: usize,
    pub first_append_failures: u64,
    pub preempted: u64,
    #[serde(flatten)]
    pub cache: CacheCounts,
    #[serde(flatten)]
    pub chaos: ChaosCounts,
    pub forks: u64,
    pub drafted: u64,
    pub drafts_accepted: u64,
    pub concurrency: f64,
    pub reference_concurrency: f64,
    pub concurrency_peak: u64,
    pub reference_concurrency_peak: u64,
    pub seconds: f64,
    pub reference_seconds: f64,
    pub tokens_per_s: f64,
    pub reference_tokens_per_s: f64,
    pub audit: String,
}

impl Report {
    /// Returns whether every token is right, every request was served, and no block is lost.
    pub fn is_right(&self) -> bool {
        let is_served = self.completed > 0 && self.completed + self.cancelled == self.requests;
        is_served && self.tokens_wrong == 0 && self.audit == "ok"
    }
}

/// How one of the two engines served a storm.
struct Served {
    received: Vec<Received>,
    took: Duration,
    counts: Counts,
    cache: CacheCounts,
}

impl Served {
    fn tokens(&self) -> usize {
        self.received.iter().flat_map(|received| &received.answers).map(Vec::len).sum()
    }

    fn concurrency(&self, workers: usize) -> f64 {
        workers as f64 * self.counts.step_jobs as f64 / self.counts.steps.max(1) as f64
    }
}

impl Storm {
    /// Makes the requests: system prompts that are shared, several answers, drafts, cancellations.
    pub fn plan(&self, vocab: usize) -> Vec<Planned> {
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let tokens = |rng: &mut fastrand::Rng, count| (0..count).map(|_| rng.u32(..vocab as u32)).collect();
        let systems: Vec<Vec<u32>> = (0..3).map(|_| tokens(&mut rng, self.tokens_max / 4)).collect();
        let planned = (0..self.requests).map(|_| {
            let mut prompt = if rng.u32(..4) > 0 { systems[rng.usize(..3)].clone() } else { Vec::new() };
            let own: Vec<u32> = {
                let count = rng.usize(1..self.tokens_max / 4);
                tokens(&mut rng, count)
            };
            prompt.extend(own);
            let request = Request {
                tokens: rng.usize(1..=self.tokens_max / 4),
                answers: if rng.u32(..6) == 0 { rng.u32(2..=3) } else { 1 },
                sampling: Sampling { temperature: [0.0, 0.7][rng.usize(..2)], seed: rng.u64(..) },
                drafts: [0, 3][rng.usize(..2)],
                is_urgent: rng.u32(..8) == 0,
                prompt,
            };
            let cancel_after = (rng.u32(..10) == 0).then(|| rng.usize(..request.tokens));
            Planned { request, cancel_after }
        });
        planned.collect()
    }

    /// Serves the requests from contiguous caches and from a pool of as many bytes, and compares.
    ///
    /// Needs a tokio runtime with a timer and several threads.
    ///
    /// # Errors
    ///
    /// An engine, a pool, or the background compaction could not be started; a worker failed.
    pub async fn run(&self, model: Model) -> Result<Report, Box<dyn std::error::Error>> {
        let plan = self.plan(model.config().vocab);
        let model = Arc::new(model);
        let config = model.config().clone();
        // Each worker of the reference may have every slot; the pool has room for twice as many
        // jobs.
        let limits =
            |jobs: usize| Limits { jobs: jobs.div_ceil(self.workers).max(1), step_tokens: self.step_tokens };

        let cache = Contiguous::new(&config, self.slots, self.tokens_max);
        let engine = Engine::start(cache, model.clone(), self.workers, limits(self.slots), self.tokens_max);
        let reference = self.serve(engine, &plan).await?.1;

        let pool = self.pool(&config)?;
        let host = Pool::builder(pool.layout().clone()).blocks(pool.total_blocks());
        let host = host.prefix_cache(self.prefix_config()).build()?;
        let runtime = tokio::runtime::Handle::current();
        let swap = Swap { host: host.clone(), tokens_min: self.tokens_max / 4, runtime };
        let cache = Paged::new(pool.clone(), config.kv_row(), HEADROOM, Some(swap));
        let (stop, stopped) = watch::channel(false);
        let chaos = self.has_chaos.then(|| tokio::spawn(self.chaos(pool.clone(), stopped)));
        let engine = Engine::start(cache, model, self.workers, limits(2 * self.slots), self.tokens_max);
        let served = self.serve(engine, &plan).await;
        stop.send_replace(true);
        let chaos = match chaos {
            Some(chaos) => chaos.await??,
            None => ChaosCounts::default(),
        };
        let (cache, served) = served?;
        drop(cache);

        let (tokens, tokens_wrong) = (served.tokens(), wrong(&plan, &served.received, &reference.received));
        let completed = completed(&plan, &served.received);
        let cancelled = plan.iter().filter(|planned| planned.cancel_after.is_some()).count();
        let per_second = |served: &Served| served.tokens() as f64 / served.took.as_secs_f64();
        Ok(Report {
            requests: plan.len(),
            completed,
            cancelled,
            tokens,
            tokens_wrong,
            first_append_failures: served.counts.first_append_failures,
            preempted: served.counts.preempted,
            cache: served.cache,
            chaos,
            forks: served.counts.forks,
            drafted: served.counts.drafted,
            drafts_accepted: served.counts.accepted,
            concurrency: served.concurrency(self.workers),
            reference_concurrency: reference.concurrency(self.workers),
            concurrency_peak: served.counts.concurrency_peak,
            reference_concurrency_peak: reference.counts.concurrency_peak,
            seconds: served.took.as_secs_f64(),
            reference_seconds: reference.took.as_secs_f64(),
            tokens_per_s: per_second(&served),
            reference_tokens_per_s: per_second(&reference),
            audit: audit(&[&pool, &host]),
        })
    }

    fn prefix_config(&self) -> PrefixConfig {
        // The same key for both pools: a swapped sequence keeps its hashes.
        PrefixConfig::new().key(HashKey::from_bytes([7; 32]))
    }

    fn pool(&self, config: &crate::config::ModelConfig) -> Result<Pool, Box<dyn std::error::Error>> {
        let blocks = self.blocks();
        let builder = Pool::builder(config.layout(self.block_tokens)?).blocks(blocks).blocks_max(blocks);
        Ok(builder.segment_blocks(64).prefix_cache(self.prefix_config()).build()?)
    }

    /// Submits all requests, and receives their answers.
    async fn serve<C: KvCache + 'static>(
        &self,
        engine: Engine<C, Model>,
        plan: &[Planned],
    ) -> Result<(Arc<C>, Served), Box<dyn std::error::Error>>
    where
        C::Parked: 'static,
    {
        let began = Instant::now();
        let clients = plan.iter().map(|planned| {
            let stream = engine.submit(planned.request.clone())?;
            Ok(tokio::spawn(receive(stream, planned.request.answers, planned.cancel_after)))
        });
        let clients = clients.collect::<Result<Vec<_>, crate::error::SubmitError>>()?;
        let mut received = Vec::new();
        for client in clients {
            received.push(client.await?);
        }
        let took = began.elapsed();
        let ended: Result<_, EngineError> = tokio::task::spawn_blocking(|| engine.shut_down()).await?;
        let (cache, counts) = ended?;
        let cache_counts = cache.counts();
        Ok((cache, Served { received, took, counts, cache: cache_counts }))
    }

    /// Returns the number of blocks of the longest sequence.
    fn blocks_min(&self) -> usize {
        self.tokens_max.div_ceil(self.block_tokens)
    }

    /// Returns the number of blocks in the memory of the contiguous caches.
    fn blocks(&self) -> usize {
        (self.slots * self.tokens_max / self.block_tokens).max(self.blocks_min())
    }

    /// Compacts and resizes the pool until it is told to stop.
    fn chaos(
        &self,
        pool: Pool,
        stopped: watch::Receiver<bool>,
    ) -> impl Future<Output = Result<ChaosCounts, DefragError>> + use<> {
        let blocks = self.blocks();
        let sizes = (blocks / 2).max(self.blocks_min())..=blocks;
        let (mut rng, mut counts) = (fastrand::Rng::with_seed(!self.seed), ChaosCounts::default());
        async move {
            let background = pool.start_defragmenter(DefragConfig::new().threshold(0.0))?;
            while !*stopped.borrow() {
                let options = ResizeOptions::new().patience(Duration::from_millis(50));
                match pool.resize_with(rng.usize(sizes.clone()), options).await {
                    Ok(report) => {
                        counts.resizes += 1;
                        counts.moved_blocks += report.moved.moved_blocks;
                    }
                    // Open blocks lie beyond the new end, or too many blocks are in use.
                    Err(_) => counts.resizes_refused += 1,
                }
                counts.moved_blocks += pool.defragment().await?.moved_blocks;
                tokio::time::sleep(Duration::from_millis(rng.u64(1..10))).await;
            }
            counts.moved_blocks += background.stop().await.moved_blocks;
            Ok(counts)
        }
    }
}

/// Receives the answers of one request, until they end or the client has enough.
async fn receive(
    mut stream: UnboundedReceiver<Event>,
    answers: u32,
    cancel_after: Option<usize>,
) -> Received {
    let mut received = Received { answers: vec![Vec::new(); answers as usize], finished: 0 };
    let mut tokens = 0;
    while cancel_after.is_none_or(|enough| tokens < enough) {
        match stream.recv().await {
            Some(Event::Token { answer, token, digest }) => {
                received.answers[answer as usize].push((token, digest));
                tokens += 1;
            }
            Some(Event::Finished { .. }) => received.finished += 1,
            None => break,
        }
    }
    received
}

/// Counts the requests that are not cancelled and of which every answer was finished.
fn completed(plan: &[Planned], received: &[Received]) -> usize {
    let is_complete = |(planned, received): &(&Planned, &Received)| {
        planned.cancel_after.is_none() && received.finished == planned.request.answers as usize
    };
    plan.iter().zip(received).filter(is_complete).count()
}

/// Counts tokens that differ from the reference's, in the token or in a bit of the logits, and
/// tokens that only one of the two has. Of a cancelled request, answers may end anywhere.
fn wrong(plan: &[Planned], received: &[Received], reference: &[Received]) -> usize {
    let mut wrong = 0;
    for ((planned, received), reference) in plan.iter().zip(received).zip(reference) {
        for (answer, expected) in received.answers.iter().zip(&reference.answers) {
            wrong += answer.iter().zip(expected).filter(|(token, expected)| token != expected).count();
            if planned.cancel_after.is_none() {
                wrong += answer.len().abs_diff(expected.len());
            }
        }
    }
    wrong
}

/// Audits pools whose users have ended.
fn audit(pools: &[&Pool]) -> String {
    for pool in pools {
        wait_for_threads(pool, 0);
        if let Err(error) = pool.audit() {
            return error.to_string();
        }
        let (available, total) = (pool.available_blocks(), pool.total_blocks());
        if available != total || pool.sequence_count() > 0 {
            return format!("{available} of {total} blocks available, {} sequences", pool.sequence_count());
        }
    }
    "ok".into()
}
