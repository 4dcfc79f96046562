use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::error::LinkError;
use super::transfers::{Item, Sent};
use crate::wire::{Ack, Limits};

const ACKS_MAX: usize = 1024;

pub(super) struct Stream {
    pub(super) work: Notify,
    out: Mutex<Out>,
}

struct Out {
    acks: VecDeque<Ack>,
    /// In the order of sending.
    sent: VecDeque<Sent>,
    /// Time of the last item or acknowledgement.
    progress: Instant,
}

/// The next work of the write loop.
pub(super) enum Work {
    Ack(Ack),
    Item(Item),
    /// None, until this time if items await their acknowledgement.
    Idle(Option<Instant>),
}

impl Stream {
    pub(super) fn new() -> Arc<Self> {
        let out = Out { acks: VecDeque::new(), sent: VecDeque::new(), progress: Instant::now() };
        Arc::new(Self { work: Notify::new(), out: Mutex::new(out) })
    }

    pub(super) fn acknowledge(&self, ack: Ack) -> Result<(), LinkError> {
        let mut out = self.out.lock();
        if out.acks.len() >= ACKS_MAX {
            return Err(LinkError::Limit { what: "unread acknowledgements", max: ACKS_MAX });
        }
        out.acks.push_back(ack);
        drop(out);
        self.work.notify_one();
        Ok(())
    }

    /// Takes the oldest unacknowledged item, which must be the acknowledged one.
    pub(super) fn acknowledged(&self, ack: Ack) -> Option<Sent> {
        let mut out = self.out.lock();
        out.sent.front().filter(|sent| sent.item == ack.item)?;
        out.progress = Instant::now();
        let sent = out.sent.pop_front();
        drop(out);
        self.work.notify_one();
        sent
    }

    pub(super) fn take_sent(&self) -> VecDeque<Sent> {
        std::mem::take(&mut self.out.lock().sent)
    }

    /// Notes an item as sent, before its first byte.
    pub(super) fn sending(&self, sent: Sent) {
        let mut out = self.out.lock();
        out.progress = Instant::now();
        out.sent.push_back(sent);
    }

    /// Returns the next work; calls `next_item` if no acknowledgement is queued and there is room.
    pub(super) fn next(&self, limits: &Limits, next_item: impl FnOnce() -> Option<Item>) -> Work {
        let (full, idle) = {
            let mut out = self.out.lock();
            if let Some(ack) = out.acks.pop_front() {
                return Work::Ack(ack);
            }
            let waits = !out.sent.is_empty();
            (out.sent.len() >= limits.window.max(1), waits.then(|| out.progress + limits.item))
        };
        if full {
            return Work::Idle(idle);
        }
        next_item().map_or(Work::Idle(idle), Work::Item)
    }
}
