//! Requests that come next, whose prefixes are brought back from the tier before they are admitted.
//!
//! The tasks run beside the traffic: a tier that is slow delays the requests that wait for it, for
//! at most the time of the setting `tier-wait`, and no sequence that runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::prefix::PrefixKeys;
use kvpool_node::tier::Tiered;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::running::Turn;
use crate::{Request, Shape, Text};

/// The tier of a pool, for the threads of the traffic.
#[derive(Clone)]
pub struct Fetching {
    /// The pool with its tier.
    pub tiered: Arc<Tiered>,
    /// The runtime of the tasks.
    pub runtime: Handle,
    /// Longest time that a request waits for its prefix.
    pub wait: Duration,
}

/// A request that is not admitted yet.
pub(super) struct Coming {
    pub turn: Turn,
    pub request: Request,
    pub text: Text,
    /// The task that brings its prefix back.
    fetch: Option<JoinHandle<()>>,
}

impl Coming {
    pub fn new(turn: Turn) -> Self {
        let (request, text) = turn.text();
        Self { turn, request, text, fetch: None }
    }

    /// Returns the number of blocks that it will need.
    pub fn blocks(&self, shape: Shape) -> usize {
        shape.blocks(self.request.tokens())
    }

    /// Returns the tokens of its prompt.
    pub fn prompt(&self) -> Vec<u32> {
        let mut prompt = Vec::new();
        self.text.ids(self.request.input_tokens as usize, &mut prompt);
        prompt
    }

    /// Begins to bring its prefix back, once.
    pub fn fetch(&mut self, fetching: &Fetching) {
        if self.fetch.is_some() {
            return;
        }
        let (tiered, prompt, deadline) =
            (fetching.tiered.clone(), self.prompt(), Instant::now() + fetching.wait);
        self.fetch = Some(fetching.runtime.spawn(async move {
            // Whatever fails is a miss.
            let _ = tiered.bring_back(&PrefixKeys::new(), &prompt, deadline).await;
        }));
    }

    /// Returns whether its prefix has come, as far as it will.
    pub fn has_come(&self) -> bool {
        self.fetch.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Gives it up, and waits until no task of it uses the pool.
    pub fn give_up(self, fetching: &Fetching) {
        if let Some(fetch) = self.fetch {
            fetch.abort();
            // An error says that it was aborted.
            let _ = fetching.runtime.block_on(fetch);
        }
    }
}
