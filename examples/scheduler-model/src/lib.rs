//! A scheduler of several workers over one pool, small enough to be model-checked whole. Its threads and locks come from
//! [`kvpool::testing`]: the standard library's, or loom's in a model.
//!
//! Workers take requests from a queue. A request needs a number of blocks, one after the other. A worker that is refused
//! a block gives back what it holds, puts its request into the queue again, and sleeps until another worker has given
//! blocks back.

use kvpool::pool::{AllocRequest, Pool};
use kvpool::testing::sync::{Condvar, Mutex};

#[derive(Default)]
struct State {
    /// Blocks that each waiting request needs.
    queue: Vec<usize>,
    /// Workers that hold blocks, or try to.
    running: usize,
    /// Times that a worker gave its blocks back.
    returns: usize,
    finished: usize,
}

/// See the crate's documentation.
pub struct Scheduler {
    pool: Pool,
    state: Mutex<State>,
    returned: Condvar,
}

impl Scheduler {
    /// A scheduler of requests that need so many blocks each.
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
            // Blocks that came back while the request was tried may be what it lacked: it must not sleep then.
            let is_stale = own != seen + 1 && !cfg!(feature = "lost-wake-up");
            while !is_stale && state.returns == own && (state.running > 0 || cfg!(feature = "lost-wake-up")) {
                state = self.returned.wait(state).unwrap();
            }
        }
    }

    /// Requests that were served.
    pub fn finished(&self) -> usize {
        self.state.lock().unwrap().finished
    }

    /// Takes the blocks of a request, and gives all of them back. False if the pool had too few.
    fn serve(&self, blocks: usize) -> bool {
        let mut leases = Vec::new();
        (0..blocks).all(|_| self.pool.allocate(AllocRequest::new(1)).map(|lease| leases.push(lease)).is_ok())
    }
}
