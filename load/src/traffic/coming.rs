//! Upcoming requests, whose prefixes are fetched from the tier before they are admitted.
//!
//! The tasks run beside the traffic: a slow tier delays only the requests that wait for it, by at
//! most `tier-wait`.

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
    /// Longest wait of a request for its prefix.
    pub wait: Duration,
}

pub(super) struct Coming {
    pub turn: Turn,
    pub request: Request,
    pub text: Text,
    fetch: Option<JoinHandle<()>>,
}

impl Coming {
    pub fn new(turn: Turn) -> Self {
        let (request, text) = turn.text();
        Self { turn, request, text, fetch: None }
    }

    pub fn blocks(&self, shape: Shape) -> usize {
        shape.blocks(self.request.tokens())
    }

    pub fn prompt(&self) -> Vec<u32> {
        let mut prompt = Vec::new();
        self.text.ids(self.request.input_tokens as usize, &mut prompt);
        prompt
    }

    /// Begins to fetch its prefix, once.
    pub fn fetch(&mut self, fetching: &Fetching) {
        if self.fetch.is_some() {
            return;
        }
        let (tiered, prompt, deadline) =
            (fetching.tiered.clone(), self.prompt(), Instant::now() + fetching.wait);
        self.fetch = Some(fetching.runtime.spawn(async move {
            // Any failure is a miss.
            let _ = tiered.bring_back(&PrefixKeys::new(), &prompt, deadline).await;
        }));
    }

    /// Returns whether fetching its prefix has ended.
    pub fn has_come(&self) -> bool {
        self.fetch.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Cancels it, and waits until its task no longer uses the pool.
    pub fn give_up(self, fetching: &Fetching) {
        if let Some(fetch) = self.fetch {
            fetch.abort();
            let _ = fetching.runtime.block_on(fetch);
        }
    }
}
