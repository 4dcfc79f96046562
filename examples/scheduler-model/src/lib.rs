//! A scheduler of several workers over one pool, small enough for an exhaustive model. Its threads
//! and locks come from [`kvpool::testing`]: the standard library's, or loom's in a model.
//!
//! Workers take requests from a queue. A request needs a number of blocks, one after the other. If
//! a worker is refused a block, it frees the blocks that it holds, puts its request back into the
//! queue, and sleeps until another worker has freed blocks.

use kvpool::{AllocRequest, Pool};
use kvpool::testing::sync::{Condvar, Mutex};

#[derive(Default)]
struct State {
    /// Numbers of blocks that the waiting requests need.
    queue: Vec<usize>,
    /// Number of workers that hold blocks, or try to allocate them.
    running: usize,
    /// Number of times that a worker freed its blocks.
    returns: usize,
    finished: usize,
}

/// A queue of requests, served by several workers over one pool.
pub struct Scheduler {
    pool: Pool,
    state: Mutex<State>,
    returned: Condvar,
}

impl Scheduler {
    /// Creates a scheduler of requests that need these numbers of blocks.
    pub fn new(pool: Pool, requests: impl IntoIterator<Item = usize>) -> Self {
        let queue = requests.into_iter().collect();
        Self { pool, state: Mutex::new(State { queue, ..State::default() }), returned: Condvar::new() }
    }

    /// Serves requests until the queue is empty; called by each worker.
    pub fn work(&self) {
        loop {
            let mut state = self.state.lock().unwrap();
            let Some(blocks) = state.queue.pop() else { return };
            state.running += 1;
            let seen = state.returns;
            drop(state);

            let is_finished = self.serve(blocks);

            let mut state = self.state.lock().unwrap();
            state.running -= 1;
            state.returns += 1;
            state.finished += is_finished as usize;
            self.returned.notify_all();
            if is_finished {
                continue;
            }
            state.queue.push(blocks);
            let own = state.returns;
            // Blocks freed while the request was tried may be the missing ones: the worker must not
            // sleep then.
            let is_stale = own != seen + 1 && !cfg!(feature = "lost-wake-up");
            while !is_stale && state.returns == own && (state.running > 0 || cfg!(feature = "lost-wake-up")) {
                state = self.returned.wait(state).unwrap();
            }
        }
    }

    /// Returns the number of requests served.
    pub fn finished(&self) -> usize {
        self.state.lock().unwrap().finished
    }

    /// Allocates the blocks of a request, and frees all of them. Returns false if the pool had too
    /// few.
    fn serve(&self, blocks: usize) -> bool {
        let mut leases = Vec::new();
        (0..blocks).all(|_| self.pool.allocate(AllocRequest::new(1)).map(|lease| leases.push(lease)).is_ok())
    }
}
