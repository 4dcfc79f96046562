//! The engine: worker threads over one cache, and the streams of their answers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use kvpool::testing::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::cache::KvCache;
use crate::error::{EngineError, SubmitError};
use crate::model::Network;
use crate::request::{ANSWERS_MAX, Event, Job, Rank, Request};
use crate::scheduler::{Counts, Scheduler};
use crate::worker::{Limits, Worker};

/// A running engine.
pub struct Engine<C: KvCache, N> {
    cache: Arc<C>,
    network: Arc<N>,
    scheduler: Arc<Scheduler<C::Parked>>,
    workers: Vec<JoinHandle<Result<(), EngineError>>>,
    arrivals: AtomicU64,
    tokens_max: usize,
}

impl<C: KvCache + 'static, N: Network + 'static> Engine<C, N>
where
    C::Parked: 'static,
{
    /// Starts worker threads.
    ///
    /// `tokens_max` tokens of one sequence must fit into the cache at its smallest size.
    pub fn start(cache: C, network: Arc<N>, workers: usize, limits: Limits, tokens_max: usize) -> Self {
        let (cache, scheduler) = (Arc::new(cache), Arc::new(Scheduler::default()));
        let workers = (0..workers).map(|_| {
            let worker = Worker::new(cache.clone(), network.clone(), scheduler.clone(), limits);
            std::thread::spawn(move || worker.run())
        });
        let workers = workers.collect();
        Self { cache, network, scheduler, workers, arrivals: AtomicU64::new(1), tokens_max }
    }

    /// Submits a request, and returns the stream of its answers. Dropping the stream cancels it.
    ///
    /// The stream ends without [`Event::Finished`] if a worker fails.
    ///
    /// # Errors
    ///
    /// [`SubmitError`].
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, SubmitError> {
        let Request { prompt, tokens, answers, sampling, drafts, is_urgent } = request;
        let (vocab, max) = (self.network.vocab(), self.tokens_max);
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(SubmitError::Token { token, vocab });
        }
        if tokens == 0 || answers == 0 || answers > ANSWERS_MAX {
            return Err(SubmitError::Nothing { tokens, answers, answers_max: ANSWERS_MAX });
        }
        if prompt.len().saturating_add(tokens) > max {
            return Err(SubmitError::TooLong { prompt: prompt.len(), tokens, max });
        }
        let (events, stream) = unbounded_channel();
        let arrival = self.arrivals.fetch_add(1, Relaxed);
        let job = Job {
            rank: Rank { can_wait: !is_urgent, arrival, answer: 0 },
            tokens_max: prompt.len() + tokens,
            tokens: prompt,
            forks: answers - 1,
            sampling,
            drafts,
            events,
        };
        if self.scheduler.submit(job) { Ok(stream) } else { Err(SubmitError::Closed) }
    }

    /// Returns the cache.
    pub fn cache(&self) -> &C {
        &self.cache
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.scheduler.counts()
    }

    /// Serves what was submitted, and ends the workers. Returns the cache.
    ///
    /// # Errors
    ///
    /// The first error of a worker.
    pub fn shut_down(self) -> Result<(Arc<C>, Counts), EngineError> {
        self.scheduler.close();
        let outcomes: Vec<_> = self.workers.into_iter().map(JoinHandle::join).collect();
        for outcome in outcomes {
            outcome.map_err(|_| EngineError::Panicked)??;
        }
        Ok((self.cache, self.scheduler.counts()))
    }
}
