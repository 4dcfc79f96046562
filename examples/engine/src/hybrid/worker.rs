//! Workers: each computes several sequences in one batch, over a pool that all workers share.
//!
//! A worker has the blocks of a step reserved before its batch begins. While it waits in the pool's
//! line for them, it holds no batch, so that blocks which others give up can be reused. If it waits
//! in vain, it preempts one of its own sequences, whose job joins the queue of jobs again. It does
//! not if the error says that the blocks only wait for the end of a batch.
//!
//! A job that was preempted twice is admitted with the blocks of its whole answer, in windows too.
//! No growth of it is refused, so that jobs do not preempt each other for good.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvpool::{
    AdmitRequest, Batch, GroupedSequence, LowestPriorityFirst, Retry, SequenceError, SequenceId, Tokens,
};
use serde::Serialize;
use tokio::runtime::Handle;

use super::frames::{Ahead, Paged};
use super::model::HybridModel;
use super::request::Planned;
use crate::error::EngineError;
use crate::request::{ANSWERS_MAX, draft};

/// Sequences of a worker, beside forks.
const SEQUENCES: usize = 3;

/// How long a sequence waits for the blocks of a step.
const PATIENCE: Duration = Duration::from_millis(2);

/// One answer in the making.
pub struct Job {
    /// Index of the request.
    pub request: usize,
    /// Number of the answer.
    pub answer: u32,
    /// The prompt and the decoded tokens.
    pub tokens: Vec<u32>,
    /// Answers to be forked off when the prompt is computed.
    pub forks: u32,
    /// Number of its preemptions.
    pub preempted: u32,
}

impl Job {
    fn id(&self) -> SequenceId {
        SequenceId((self.request as u64) * u64::from(ANSWERS_MAX) + u64::from(self.answer))
    }
}

/// Counts of what workers did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the printed report")]
pub struct Counts {
    pub answers: u64,
    pub answers_wrong: u64,
    pub logits_compared: u64,
    pub logits_wrong: u64,
    pub hit_tokens: u64,
    pub states_restored: u64,
    pub states_from_drafts: u64,
    pub checkpoints: u64,
    pub waited: u64,
    pub appends_refused: u64,
    pub preempted: u64,
    pub preempted_for_lack: u64,
    pub forks: u64,
    pub copied_blocks: u64,
    pub drafted: u64,
    pub drafts_rejected: u64,
    pub drafts_in_part: u64,
    pub blocks_given_up: u64,
    pub abandoned_batches: u64,
}

/// What workers share.
pub struct Shared<'a> {
    /// The pool and its memory.
    pub paged: Paged,
    /// The model.
    pub model: &'a HybridModel,
    /// The requests.
    pub plan: &'a [Planned],
    /// Jobs that no worker has.
    pub jobs: Mutex<VecDeque<Job>>,
    /// What workers did.
    pub counts: Mutex<Counts>,
    /// Largest number of known tokens of a sequence in a step.
    pub step_tokens: usize,
    /// Has a timer.
    pub runtime: Handle,
}

impl Shared<'_> {
    fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut lock(&self.counts));
    }
}

/// Returns what a lock guards; a worker that panicked has left it whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the result, or `None` for a lack of blocks.
fn unless_lacking<T>(result: Result<T, SequenceError>) -> Result<Option<T>, SequenceError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.retry() != Retry::Never => Ok(None),
        Err(error) => Err(error),
    }
}

/// A job with its sequence, and its part of the next step.
struct Running {
    job: Job,
    sequence: GroupedSequence,
    /// Number of known tokens.
    known: usize,
    /// Drafts behind the last known token.
    drafts: Vec<u32>,
    /// The states behind the drafts of the last step.
    ahead: Ahead,
    /// Length behind which states are kept.
    cut: Option<usize>,
    /// Position of the first computed token, and the logits.
    computed: Option<(usize, Vec<f32>)>,
}

/// A worker.
pub struct Worker<'a> {
    shared: &'a Shared<'a>,
    running: Vec<Running>,
    /// Decides which batches are abandoned, as after an error of a device, and which sequences are
    /// preempted without need; none without.
    chaos: Option<fastrand::Rng>,
}

impl<'a> Worker<'a> {
    /// Creates a worker. With a generator, some batches are abandoned and some sequences preempted.
    pub fn new(shared: &'a Shared<'a>, chaos: Option<fastrand::Rng>) -> Self {
        Self { shared, running: Vec::new(), chaos }
    }

    /// Serves jobs until there are none.
    ///
    /// # Errors
    ///
    /// Errors of the pool other than a lack of blocks.
    pub fn run(mut self) -> Result<(), EngineError> {
        while self.admit()? {
            self.grow()?;
            let mut batch = self.shared.paged.pool().begin_batch();
            for running in &mut self.running {
                running.compute(self.shared, &mut batch)?;
            }
            if self.happens(40) {
                drop(batch); // Sequences are as short as before it, or, with a state, empty.
                self.shared.count(|counts| counts.abandoned_batches += 1);
                continue;
            }
            batch.finish();
            self.proceed()?;
            if !self.running.is_empty() && self.happens(40) {
                self.preempt(0);
            }
        }
        Ok(())
    }

    /// Returns whether something happens that does once in so many steps.
    fn happens(&mut self, steps: u32) -> bool {
        self.chaos.as_mut().is_some_and(|rng| rng.u32(..steps) == 0)
    }

    /// Admits jobs. Returns whether there is something to compute.
    fn admit(&mut self) -> Result<bool, EngineError> {
        let pool = self.shared.paged.pool();
        while self.running.len() < SEQUENCES {
            let Some(job) = lock(&self.shared.jobs).pop_front() else { break };
            let of_job = &self.shared.plan[job.request].request;
            let request = AdmitRequest::new(job.id(), &job.tokens).session(of_job.session);
            let request = match job.preempted {
                0 | 1 => request.chunk(self.shared.step_tokens),
                _ => request.headroom(of_job.tokens_max() - job.tokens.len()),
            };
            // Who holds no blocks can wait in line.
            let admitted = match self.running.is_empty() {
                true => {
                    let until = Instant::now() + Duration::from_millis(100);
                    self.shared.runtime.block_on(pool.admit_grouped_async(&request).until(until))
                }
                false => pool.admit_grouped(&request),
            };
            let Some(sequence) = unless_lacking(admitted)? else {
                lock(&self.shared.jobs).push_front(job);
                match self.running.is_empty() {
                    true => continue,
                    false => break,
                }
            };
            self.shared.count(|counts| counts.hit_tokens += sequence.len() as u64);
            self.running.push(Running::new(job, sequence));
        }
        Ok(!self.running.is_empty())
    }

    /// Reserves the blocks of a step for each sequence, in line if necessary; if that takes too
    /// long, preempts.
    fn grow(&mut self) -> Result<(), EngineError> {
        let pool = self.shared.paged.pool();
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            let tokens = running.plan(self.shared)?;
            if unless_lacking(running.sequence.reserve(tokens))?.is_some() {
                index += 1;
                continue;
            }
            let grown = pool.reserve_grouped_async(&mut running.sequence, tokens);
            let grown = self.shared.runtime.block_on(grown.until(Instant::now() + PATIENCE));
            match grown {
                Ok(()) => {
                    self.shared.count(|counts| counts.waited += 1);
                    index += 1;
                    continue;
                }
                // They are free once the batches in flight have ended: no preemption is faster.
                Err(error) if error.retry() == Retry::AfterBatch => continue,
                Err(error) if error.retry() == Retry::Never => return Err(error.into()),
                Err(_) => {}
            }
            // The youngest of this worker's, which may be the one that lacks blocks.
            let victims = pool.victims(&LowestPriorityFirst);
            let mut of_own = victims.iter().filter_map(|victim| {
                self.running.iter().position(|running| running.sequence.id() == victim.id)
            });
            let victim = of_own.next().unwrap_or(index);
            self.preempt(victim);
            self.shared.count(|counts| counts.preempted_for_lack += 1);
            index -= usize::from(victim < index);
        }
        Ok(())
    }

    fn preempt(&mut self, index: usize) {
        let Running { mut job, sequence, .. } = self.running.remove(index);
        let given_up = given_up(&sequence);
        sequence.preempt();
        self.shared.count(|counts| {
            counts.preempted += 1;
            counts.blocks_given_up += given_up;
        });
        job.preempted += 1;
        lock(&self.shared.jobs).push_back(job);
    }

    /// Compares logits, chooses tokens, forks, and closes what is done.
    fn proceed(&mut self) -> Result<(), EngineError> {
        let (shared, mut forks) = (self.shared, Vec::new());
        for running in &mut self.running {
            let Some(last) = running.proceed(shared)? else { continue };
            let request = &shared.plan[running.job.request].request;
            for answer in 1..=std::mem::take(&mut running.job.forks) {
                let mut tokens = request.prompt.clone();
                tokens.push(request.choose(&last, answer, tokens.len()));
                let job = Job { answer, tokens, forks: 0, preempted: 0, ..running.job };
                let fork = running.sequence.fork(job.id())?;
                forks.push(Running::new(job, fork));
            }
        }
        shared.count(|counts| counts.forks += forks.len() as u64);
        self.running.extend(forks);
        let is_done = |running: &mut Running| {
            running.job.tokens.len() == shared.plan[running.job.request].request.tokens_max()
        };
        for Running { job, sequence, .. } in self.running.extract_if(.., is_done) {
            let expected = &shared.plan[job.request].expected[job.answer as usize];
            shared.count(|counts| {
                counts.answers += 1;
                counts.answers_wrong += u64::from(job.tokens != expected.tokens);
                counts.blocks_given_up += given_up(&sequence);
            });
        }
        Ok(())
    }
}

impl Running {
    fn new(job: Job, sequence: GroupedSequence) -> Self {
        let (drafts, ahead) = (Vec::new(), Ahead::default());
        Self { job, sequence, known: 0, drafts, ahead, cut: None, computed: None }
    }

    /// Plans the next step, and returns its number of tokens.
    fn plan(&mut self, shared: &Shared<'_>) -> Result<usize, SequenceError> {
        let Self { job, sequence, .. } = self;
        let (request, tokens) = (&shared.plan[job.request].request, job.tokens.len());
        // Decoded tokens, and those that an abandoned batch has taken back.
        sequence.announce(&job.tokens[sequence.announced()..])?;
        self.cut = sequence.next_cut();
        let missing = self.cut.unwrap_or(tokens) - sequence.len();
        self.known = missing.min(shared.step_tokens);
        self.drafts.clear();
        // States are kept behind final tokens only.
        if sequence.len() + self.known == tokens && job.forks == 0 && self.cut.is_none() {
            // The answer's last token is chosen, not drafted.
            let most = request.drafts.min(request.tokens_max() - tokens - 1);
            self.drafts.extend_from_slice(draft(&job.tokens, most));
        }
        Ok(self.known + self.drafts.len())
    }

    /// Appends the tokens of the step, and computes them. Computes nothing if blocks are lacking.
    fn compute(&mut self, shared: &Shared<'_>, batch: &mut Batch) -> Result<(), SequenceError> {
        let (paged, sequence) = (&shared.paged, &mut self.sequence);
        self.computed = None;
        let appended = unless_lacking(batch.append_grouped(sequence, Tokens::Announced(self.known)))?;
        let Some(appended) = appended else {
            // Reserved; but a last block that began to move since then is copied.
            shared.count(|counts| counts.appends_refused += 1);
            return Ok(());
        };
        // Both before the first layer: the states of a hit, and blocks that are shared with forks.
        paged.memory().make(&appended.copies);
        let first = appended.tokens.start;
        let mut tokens = self.job.tokens[appended.tokens.clone()].to_vec();
        if !self.drafts.is_empty() {
            let drafted = batch.append_grouped(sequence, Tokens::Draft(self.drafts.len()));
            match unless_lacking(drafted)? {
                Some(_) => tokens.extend_from_slice(&self.drafts),
                None => self.drafts.clear(),
            }
        }
        // Accepted drafts of the last step, over which the states have not been stepped.
        let accepted = match appended.stepped.is_empty() {
            false => first - appended.stepped.start,
            true => 0,
        };
        let mut view = paged.view(batch, sequence, &mut self.ahead, accepted);
        let logits = shared.model.forward(&mut view, &tokens, first)?;
        let mut kept = Vec::new();
        if self.cut == Some(first + tokens.len()) {
            // Without blocks for it, later prompts hit less.
            kept = unless_lacking(batch.checkpoint(sequence))?.unwrap_or_default();
            paged.memory().make(&kept);
        }
        shared.count(|counts| {
            let blocks = appended.copies.iter().filter(|copy| copy.group < sequence.groups()).count();
            counts.states_from_drafts += u64::from(accepted > 0);
            counts.states_restored += (appended.copies.len() - blocks) as u64;
            counts.copied_blocks += blocks as u64;
            counts.checkpoints += kept.len() as u64;
        });
        self.computed = Some((first, logits));
        Ok(())
    }

    /// Compares the logits, chooses tokens if all known ones are computed, and accepts drafts.
    /// Returns the logits behind the last known token.
    fn proceed(&mut self, shared: &Shared<'_>) -> Result<Option<Vec<f32>>, SequenceError> {
        let Some((first, logits)) = self.computed.take() else { return Ok(None) };
        let (job, vocab) = (&mut self.job, shared.model.vocab());
        let Planned { request, expected } = &shared.plan[job.request];
        let expected = expected[job.answer as usize].logits.chunks_exact(vocab).skip(first);
        let (known, mut accepted, mut last) = (job.tokens.len(), 0, None);
        let (mut compared, mut wrong) = (0, 0);
        for ((position, row), expected) in (first..).zip(logits.chunks_exact(vocab)).zip(expected) {
            compared += 1;
            let is_same = row.iter().zip(expected).all(|(one, other)| one.to_bits() == other.to_bits());
            wrong += u64::from(!is_same);
            if position + 1 < known {
                continue;
            }
            last.get_or_insert_with(|| row.to_vec());
            let token = request.choose(row, job.answer, job.tokens.len());
            job.tokens.push(token);
            if self.drafts.get(accepted) != Some(&token) {
                break;
            }
            accepted += 1;
        }
        let drafted = self.drafts.len();
        if drafted > 0 {
            self.sequence.accept(&self.drafts[..accepted])?;
        }
        shared.count(|counts| {
            counts.logits_compared += compared;
            counts.logits_wrong += wrong;
            counts.drafted += drafted as u64;
            counts.drafts_rejected += (drafted - accepted) as u64;
            counts.drafts_in_part += u64::from(0 < accepted && accepted < drafted);
        });
        Ok(last)
    }
}

/// Returns the number of blocks that the windows of a sequence have given up.
fn given_up(sequence: &GroupedSequence) -> u64 {
    (0..sequence.groups()).map(|list| sequence.group(list).blocks_given_up() as u64).sum()
}
