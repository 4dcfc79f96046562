use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::TransferError;
use tokio::sync::oneshot;

use crate::protocol::LinkId;
use crate::transport::tcp::Link;

const OPEN_MAX: usize = 1024;

/// Time for an answer, which may be lost.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Receives the answer to a query: for each hash, whether a block is cached.
pub(super) type Cached = oneshot::Sender<Result<Vec<bool>, TransferError>>;

struct Open {
    peer: LinkId,
    link: Arc<Link>,
    hashes: usize,
    cached: Cached,
    until: Instant,
}

#[derive(Default)]
pub(super) struct Questions {
    last: u64,
    open: HashMap<u64, Open>,
}

impl Questions {
    /// Opens a query for this many hashes; drops those whose caller has gone. Returns its number.
    ///
    /// # Errors
    /// `cached` and the reason, if too many are open.
    pub(super) fn begin(
        &mut self,
        (peer, link): (LinkId, Arc<Link>),
        hashes: usize,
        cached: Cached,
    ) -> Result<u64, (Cached, String)> {
        self.open.retain(|_, open| !open.cached.is_closed());
        if self.open.len() >= OPEN_MAX {
            return Err((cached, format!("{OPEN_MAX} questions are open")));
        }
        self.last += 1;
        let until = Instant::now() + PATIENCE;
        self.open.insert(self.last, Open { peer, link, hashes, cached, until });
        Ok(self.last)
    }

    pub(super) fn hashes(&self, number: u64, peer: LinkId) -> Option<usize> {
        self.open.get(&number).filter(|open| open.peer == peer).map(|open| open.hashes)
    }

    /// Returns when the first one ends that has no answer.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.open.values().map(|open| open.until).min()
    }

    /// Returns those without an answer in time, with their peers.
    pub(super) fn late(&self, now: Instant) -> Vec<(u64, LinkId)> {
        let late = self.open.iter().filter(|(_, open)| open.until <= now);
        late.map(|(&number, open)| (number, open.peer)).collect()
    }

    pub(super) fn over(&self, link: &Arc<Link>) -> Vec<u64> {
        let is_over = |open: &Open| Arc::ptr_eq(&open.link, link);
        self.open.iter().filter(|(_, open)| is_over(open)).map(|(&number, _)| number).collect()
    }

    pub(super) fn end(&mut self, number: u64, cached: Result<Vec<bool>, TransferError>) {
        if let Some(open) = self.open.remove(&number) {
            // The caller may be gone.
            let _ = open.cached.send(cached);
        }
    }
}
