//! Questions of a node about the caches of its peers, until they are answered.

use std::collections::HashMap;
use std::sync::Arc;

use kvpool::TransferError;
use tokio::sync::oneshot;

use crate::protocol::LinkId;
use crate::transport::tcp::Link;

/// Questions that may wait for an answer.
const OPEN_MAX: usize = 1024;

/// Takes the answer to a question: whether a block is cached for each hash.
pub(super) type Cached = oneshot::Sender<Result<Vec<bool>, TransferError>>;

/// A question without an answer.
struct Open {
    peer: LinkId,
    /// The one of the peer's links over which it was asked, and is answered.
    link: Arc<Link>,
    hashes: usize,
    cached: Cached,
}

/// Questions without an answer, by number.
#[derive(Default)]
pub(super) struct Questions {
    last: u64,
    open: HashMap<u64, Open>,
}

impl Questions {
    /// Begins a question for this many hashes, and returns its number. What nothing waits for any more
    /// is forgotten.
    ///
    /// # Errors
    ///
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
        self.open.insert(self.last, Open { peer, link, hashes, cached });
        Ok(self.last)
    }

    /// Returns the number of hashes of a question, if this peer was asked it.
    pub(super) fn hashes(&self, number: u64, peer: LinkId) -> Option<usize> {
        self.open.get(&number).filter(|open| open.peer == peer).map(|open| open.hashes)
    }

    /// Returns the numbers of the questions that were asked over a link.
    pub(super) fn over(&self, link: &Arc<Link>) -> Vec<u64> {
        let is_over = |open: &Open| Arc::ptr_eq(&open.link, link);
        self.open.iter().filter(|(_, open)| is_over(open)).map(|(&number, _)| number).collect()
    }

    pub(super) fn end(&mut self, number: u64, cached: Result<Vec<bool>, TransferError>) {
        if let Some(open) = self.open.remove(&number) {
            // Nothing may wait for it any more.
            let _ = open.cached.send(cached);
        }
    }
}
