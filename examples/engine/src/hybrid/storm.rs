//! The seeded storm: workers serve requests from a pool that is compacted meanwhile, and all logits
//! are compared with the reference's.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::SessionId;
use kvpool::testing::wait_for_threads;
use serde::Serialize;
use tokio::runtime::Handle;

use super::frames::{Paged, has_states};
use super::model::{HybridModel, Keeps, LayerShape};
use super::reference::decode;
use super::request::{Planned, Request};
use super::worker::{Counts, Job, Shared, Worker, lock};
use crate::config::ModelConfig;
use crate::error::EngineError;
use crate::kernels::Heads;
use crate::request::Sampling;

/// Maximum number of tokens of a sequence.
const TOKENS_MAX: usize = 224;

/// Largest number of known tokens of a sequence in a step.
const STEP_TOKENS: usize = 24;

/// Returns linear attention, windows, and full attention.
pub fn states() -> Vec<LayerShape> {
    [Keeps::State, Keeps::Window(40), Keeps::All].repeat(2).into_iter().map(shape).collect()
}

/// Returns windows, chunks, and full attention.
pub fn forks() -> Vec<LayerShape> {
    [Keeps::Window(40), Keeps::Chunk(48), Keeps::Window(40), Keeps::All].map(shape).into()
}

/// Returns a layer of the tiny model. Those that keep all tokens have half the heads of windows, as
/// in MiMo and Gemma 4.
fn shape(keeps: Keeps) -> LayerShape {
    let heads = match keeps {
        Keeps::All => Heads { q: 4, kv: 1, dim: 8 },
        Keeps::Window(_) | Keeps::Chunk(_) => Heads { q: 4, kv: 2, dim: 8 },
        Keeps::State => Heads { q: 2, kv: 2, dim: 32 },
    };
    LayerShape { keeps, heads }
}

/// Parameters of a storm.
#[derive(Clone, Copy, Debug)]
pub struct HybridStorm {
    /// Seed of the weights, the requests, the abandoned batches and the preemptions.
    pub seed: u64,
    /// Number of requests.
    pub requests: usize,
    /// Worker threads.
    pub workers: usize,
    /// Frames of the pool: at least 50, which one sequence may reserve.
    pub blocks: usize,
    /// Whether the pool is compacted meanwhile, and batches are abandoned and sequences preempted
    /// without need.
    pub has_chaos: bool,
}

/// Outcome of a storm, as it is printed.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the printed report")]
pub struct HybridReport {
    pub model: &'static str,
    pub seed: u64,
    pub requests: usize,
    #[serde(flatten)]
    pub counts: Counts,
    pub moved_blocks: usize,
    pub seconds: f64,
    pub audit: String,
}

impl HybridReport {
    /// Returns whether every logit and every answer is right, and no block is lost.
    pub fn is_right(&self) -> bool {
        let Counts { answers, answers_wrong, logits_wrong, .. } = self.counts;
        answers >= self.requests as u64 && (answers_wrong, logits_wrong) == (0, 0) && self.audit == "ok"
    }
}

impl HybridStorm {
    /// Makes the requests, and the reference's answers: system prompts that are shared,
    /// conversations that go on, drafts, and without a state several answers.
    fn plan(&self, model: &HybridModel) -> Result<Vec<Planned>, EngineError> {
        let (mut rng, has_states) = (fastrand::Rng::with_seed(self.seed), has_states(model.shapes()));
        let vocab = model.vocab() as u32;
        let random =
            |rng: &mut fastrand::Rng, count| (0..count).map(|_| rng.u32(..vocab)).collect::<Vec<_>>();
        let systems = [16, 40, 64].map(|count| random(&mut rng, count));
        let mut plan: Vec<Planned> = Vec::new();
        while plan.len() < self.requests {
            let earlier = plan.len().checked_sub(4).map(|at| &plan[at]);
            let (mut prompt, session) = match earlier.map(|earlier| (&earlier.expected[0], earlier)) {
                Some((answer, earlier)) if answer.tokens.len() < TOKENS_MAX / 2 && rng.bool() => {
                    (answer.tokens.clone(), earlier.request.session)
                }
                _ => (systems[rng.usize(..3)].clone(), SessionId(plan.len() as u64)),
            };
            let own = rng.usize(1..40);
            prompt.extend(random(&mut rng, own));
            let request = Request {
                tokens: rng.usize(4..96).min(TOKENS_MAX - prompt.len()),
                answers: if !has_states && rng.u32(..4) == 0 { rng.u32(2..=3) } else { 1 },
                sampling: Sampling { temperature: [0.0, 2.0][rng.usize(..2)], seed: rng.u64(..) },
                session,
                drafts: rng.usize(..5),
                prompt,
            };
            let answers = 0..request.answers;
            let expected = answers.map(|answer| decode(model, &request, answer)).collect::<Result<_, _>>()?;
            plan.push(Planned { request, expected });
        }
        Ok(plan)
    }

    /// Serves the requests from a pool for these layers, and compares. `runtime` needs a timer and
    /// a thread; call it from outside.
    ///
    /// # Errors
    ///
    /// The pool could not be built, or a worker failed.
    pub fn run(
        &self,
        name: &'static str,
        shapes: Vec<LayerShape>,
        runtime: &Handle,
    ) -> Result<HybridReport, Box<dyn std::error::Error>> {
        let model = HybridModel::random(ModelConfig::tiny(), shapes, TOKENS_MAX, self.seed);
        let plan = self.plan(&model)?;
        let paged = Paged::new(model.shapes(), self.blocks, STEP_TOKENS)?;
        let pool = paged.pool().clone();
        let job = |(request, planned): (usize, &Planned)| {
            let Request { prompt, answers, .. } = &planned.request;
            Job { request, answer: 0, tokens: prompt.clone(), forks: answers - 1, preempted: 0 }
        };
        let jobs: VecDeque<Job> = plan.iter().enumerate().map(job).collect();
        let shared = Shared {
            paged,
            model: &model,
            plan: &plan,
            jobs: Mutex::new(jobs),
            counts: Mutex::default(),
            step_tokens: STEP_TOKENS,
            runtime: runtime.clone(),
        };
        let (began, is_over) = (Instant::now(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let worker = |number: usize| {
                let seed = self.seed.wrapping_add(number as u64 + 1);
                let chaos = self.has_chaos.then(|| fastrand::Rng::with_seed(seed));
                let worker = Worker::new(&shared, chaos);
                scope.spawn(move || worker.run())
            };
            let workers: Vec<_> = (0..self.workers).map(worker).collect();
            let chaos = self.has_chaos.then(|| {
                scope.spawn(|| {
                    while !is_over.load(Relaxed) {
                        runtime.block_on(pool.defragment())?;
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    Ok::<_, kvpool::DefragError>(())
                })
            });
            let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            is_over.store(true, Relaxed);
            for outcome in ended {
                outcome.map_err(|_| EngineError::Panicked)??;
            }
            let chaos = chaos.map(|chaos| chaos.join().map_err(|_| EngineError::Panicked));
            Ok::<_, Box<dyn std::error::Error>>(chaos.transpose()?.transpose()?)
        })?;
        let seconds = began.elapsed().as_secs_f64();
        wait_for_threads(&pool, 0);
        let audit = match pool.audit() {
            Err(error) => error.to_string(),
            Ok(_) if pool.stats().used > 0 => format!("{} blocks are used", pool.stats().used),
            Ok(_) => "ok".into(),
        };
        let (counts, moved_blocks) = (*lock(&shared.counts), shared.paged.moved());
        let (seed, requests) = (self.seed, self.requests);
        Ok(HybridReport { model: name, seed, requests, counts, moved_blocks, seconds, audit })
    }
}
