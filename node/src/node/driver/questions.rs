//! Queries about what is cached at a peer, and answers to those of peers.
//!
//! A query that is lost, or whose answer is, fails after a while, or with the link.

use std::sync::Arc;
use std::time::Instant;

use kvpool::TransferError;
use kvpool::prefix::BlockHash;

use super::driver::Driver;
use super::requests::of_node;
use crate::node::message::NodeMessage;
use crate::node::questions::{Cached, PATIENCE};
use crate::protocol::{CacheAnswer, CacheQuestion, LinkId, List};
use crate::transport::tcp::Link;

impl Driver {
    pub(super) fn ask_cached(&mut self, name: &str, hashes: Vec<BlockHash>, cached: Cached) {
        let asked = self.linked(name, false).and_then(|(id, link)| {
            Ok((id, link.clone(), List::new(hashes).map_err(|error| of_node(name, &error))?))
        });
        let (id, link, hashes) = match asked {
            Ok(asked) => asked,
            Err(error) => return drop(cached.send(Err(error))),
        };
        let number = match self.questions.begin((id, link.clone()), hashes.len(), cached) {
            Ok(number) => number,
            Err((cached, reason)) => return drop(cached.send(Err(of_node(name, &reason)))),
        };
        if let Err(error) = link.try_send(&NodeMessage::AskCached(CacheQuestion { number, hashes })) {
            self.questions.end(number, Err(of_node(name, &error)));
        }
    }

    /// Answers a peer over the link that it used. If the queue is full, the answer is dropped.
    pub(super) fn tell_cached(&self, link: &Link, question: &CacheQuestion) {
        // One index lookup per hash; the message bounds their number.
        let cached = self.setup.pool.has_cached(&question.hashes);
        let answer = NodeMessage::TellCached(CacheAnswer::new(question.number, &cached));
        if let Err(error) = link.try_send(&answer) {
            tracing::debug!(peer = link.peer().name, %error, "a question about the cache has no answer");
        }
    }

    /// Takes the answer of a peer; ignores one to a query that this peer was not sent.
    pub(super) fn told_cached(&mut self, id: LinkId, answer: &CacheAnswer) {
        let Some(hashes) = self.questions.hashes(answer.number, id) else { return };
        let cached = answer.cached(hashes).ok_or_else(|| TransferError::Node {
            node: self.peers.name(id).to_owned(),
            reason: format!("its answer is not for {hashes} hashes"),
        });
        self.questions.end(answer.number, cached);
    }

    pub(super) fn lose_late_questions(&mut self) {
        for (number, id) in self.questions.late(Instant::now()) {
            let node = self.peers.name(id).to_owned();
            let reason = format!("it did not answer a question within {} s", PATIENCE.as_secs());
            self.questions.end(number, Err(TransferError::Node { node, reason }));
        }
    }

    /// Fails the queries over a lost link. Those over other links of the peer continue.
    pub(super) fn lose_questions(&mut self, id: LinkId, link: &Arc<Link>) {
        let node = self.peers.name(id).to_owned();
        for number in self.questions.over(link) {
            let reason = "the link was lost".to_owned();
            self.questions.end(number, Err(TransferError::Node { node: node.clone(), reason }));
        }
    }
}
