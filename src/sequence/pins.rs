//! The blocks that hints have pinned, each counted once, within a budget.
//!
//! A block counts from its grant to the end of its time, or until another hint about it, whatever
//! becomes of its contents. When the budget is short, those that are pinned no longer stop counting:
//! they were evicted, or hit and released.

use std::collections::HashMap;

use crate::ids::{BlockId, SessionId};
use crate::prefix::policy::Millis;

/// For whom a block is pinned, and until when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pin {
    pub session: Option<SessionId>,
    pub until: Millis,
}

pub(super) struct Pins {
    blocks_max: usize,
    by_block: Vec<Option<Pin>>,
    len: usize,
}

impl Pins {
    pub(super) fn new(blocks_max: usize) -> Self {
        Self { blocks_max, by_block: Vec::new(), len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns how many more blocks may be pinned, with `reserved` ones in the budget.
    pub(super) fn left(&self, reserved: usize) -> usize {
        self.blocks_max.saturating_sub(self.len + reserved)
    }

    /// Changes a pin. Returns false if there is none.
    pub(super) fn renew(&mut self, id: BlockId, pin: Pin) -> bool {
        let before = self.by_block.get_mut(id.index()).and_then(Option::as_mut);
        before.map(|before| *before = pin).is_some()
    }

    /// Pins a block that is not pinned.
    pub(super) fn add(&mut self, id: BlockId, pin: Pin) {
        if self.by_block.len() <= id.index() {
            self.by_block.resize(id.index() + 1, None);
        }
        self.by_block[id.index()] = Some(pin);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, id: BlockId) {
        let before = self.by_block.get_mut(id.index()).and_then(Option::take);
        self.len -= usize::from(before.is_some());
    }

    /// Drops pins that no longer `count`.
    #[cold]
    pub(super) fn drop_gone(&mut self, counts: impl Fn(BlockId, Millis) -> bool) {
        for (id, pin) in (0..).map(BlockId).zip(&mut self.by_block) {
            let is_gone = pin.as_ref().is_some_and(|pin| !counts(id, pin.until));
            if is_gone {
                *pin = None;
                self.len -= 1;
            }
        }
    }

    /// Returns the number of blocks that are pinned for each session.
    pub(super) fn by_session(&self, now: Millis) -> HashMap<SessionId, usize> {
        let mut all = HashMap::new();
        let pins = self.by_block.iter().flatten().filter(|pin| pin.until > now);
        pins.filter_map(|pin| pin.session).for_each(|session| *all.entry(session).or_default() += 1);
        all
    }
}
