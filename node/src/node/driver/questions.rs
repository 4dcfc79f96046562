//! Questions about what is cached at a peer, and those of peers.
//!
//! A question that is lost, or whose answer is, has no answer as long as the link lives: who asks
//! waits for a time of their own.

use std::collections::HashMap;

use kvpool::TransferError;
use kvpool::prefix::BlockHash;
use tokio::sync::oneshot;

use super::driver::Driver;
use crate::node::message::NodeMessage;
use crate::protocol::{CacheAnswer, CacheQuestion, LinkId, List};
use crate::transport::tcp::Link;

/// Questions that may wait for an answer.
const OPEN_MAX: usize = 1024;

/// Takes the answer to a question: whether a block is cached for each hash.
pub(in crate::node) type Cached = oneshot::Sender<Result<Vec<bool>, TransferError>>;

/// A question without an answer.
struct Open {
    link: LinkId,
    hashes: usize,
    cached: Cached,
}

/// Questions of this node without an answer, by number.
#[derive(Default)]
pub(super) struct Questions {
    next: u64,
    open: HashMap<u64, Open>,
}

impl Questions {
    fn begin(&mut self, link: LinkId, hashes: usize, cached: Cached) -> Result<u64, (Cached, String)> {
        self.open.retain(|_, open| !open.cached.is_closed());
        if self.open.len() >= OPEN_MAX {
            return Err((cached, format!("{OPEN_MAX} questions are open")));
        }
        self.next += 1;
        self.open.insert(self.next, Open { link, hashes, cached });
        Ok(self.next)
    }
}

impl Driver {
    /// Asks a peer which blocks it has cached.
    pub(super) fn ask_cached(&mut self, name: &str, hashes: Vec<BlockHash>, cached: Cached) {
        let failed = |reason: String| TransferError::Node { node: name.to_owned(), reason };
        let peer = self.linked(name).map_err(str::to_owned);
        let asked = peer.and_then(|id| Ok((id, List::new(hashes).map_err(|error| error.to_string())?)));
        let (id, hashes) = match asked {
            Ok(asked) => asked,
            Err(reason) => return drop(cached.send(Err(failed(reason)))),
        };
        let number = match self.questions.begin(id, hashes.len(), cached) {
            Ok(number) => number,
            Err((cached, reason)) => return drop(cached.send(Err(failed(reason)))),
        };
        let question = NodeMessage::AskCached(CacheQuestion { number, hashes });
        if let Some(Err(error)) = self.peers.get(id).map(|peer| peer.send(&question)) {
            self.end_question(number, Err(failed(error.to_string())));
        }
    }

    /// Answers a peer over the link by which it asked. A full queue drops the answer.
    pub(super) fn tell_cached(&self, link: &Link, question: &CacheQuestion) {
        // A look at the index for each hash; the message bounds their number.
        let cached = self.setup.pool.has_cached(&question.hashes);
        let answer = NodeMessage::TellCached(CacheAnswer::new(question.number, &cached));
        if let Err(error) = link.try_send(&answer) {
            tracing::debug!(peer = link.peer().name, %error, "a question about the cache has no answer");
        }
    }

    /// Takes the answer of a peer. One to a question that this peer was not asked is ignored.
    pub(super) fn told_cached(&mut self, id: LinkId, answer: &CacheAnswer) {
        let Some(open) = self.questions.open.get(&answer.number).filter(|open| open.link == id) else {
            return;
        };
        let cached = answer.cached(open.hashes).ok_or_else(|| TransferError::Node {
            node: self.peers.name(id).to_owned(),
            reason: format!("its answer is not for {} hashes", open.hashes),
        });
        self.end_question(answer.number, cached);
    }

    /// A link to a peer was lost, perhaps with questions or answers.
    pub(super) fn lose_questions(&mut self, id: LinkId) {
        let lost = |(&number, open): (&u64, &Open)| (open.link == id).then_some(number);
        let lost: Vec<u64> = self.questions.open.iter().filter_map(lost).collect();
        let node = self.peers.name(id).to_owned();
        for number in lost {
            let reason = "the link was lost".to_owned();
            self.end_question(number, Err(TransferError::Node { node: node.clone(), reason }));
        }
    }

    fn end_question(&mut self, number: u64, cached: Result<Vec<bool>, TransferError>) {
        if let Some(open) = self.questions.open.remove(&number) {
            // Nothing may wait for it any more.
            let _ = open.cached.send(cached);
        }
    }
}
