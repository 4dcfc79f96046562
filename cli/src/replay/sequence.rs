//! A sequence of a replay: with one list of blocks, or with one for each frame of a group's blocks.

use std::ops::Range;

use kvpool::prefix::policy::Millis;
use kvpool::{
    AdmitRequest, Batch, GroupCopy, GroupedSequence, Sequence, SequenceError, SequenceId, SessionId, Tokens,
};

use super::layers::added;
use super::pool::ReplayPool;

/// A sequence of a replayed pool.
#[expect(clippy::large_enum_variant, reason = "all sequences of a pool are of one variant")]
pub enum ReplaySequence {
    /// One list, which keeps all tokens.
    One(Sequence),
    /// Lists in groups of layers.
    Grouped(GroupedSequence),
}

impl ReplaySequence {
    /// Opens a sequence with the cached part of its prompt, which has no ids without a cache. In a
    /// pool of groups, all groups reserve the blocks of the rest, or none does, for steps of at
    /// most `step_tokens`.
    pub fn open(
        pool: &ReplayPool,
        (id, session): (SequenceId, Option<SessionId>),
        prompt: &[u32],
        step_tokens: u64,
    ) -> Result<Self, SequenceError> {
        if pool.is_grouped() {
            let mut request = AdmitRequest::new(id, prompt).chunk(step_tokens as usize);
            if let Some(session) = session {
                request = request.session(session);
            }
            return pool.admit_grouped(&request).map(Self::Grouped);
        }
        let mut builder = pool.sequence(id);
        if let Some(session) = session {
            builder = builder.session(session);
        }
        if prompt.is_empty() { builder.open() } else { builder.tokens(prompt) }.map(Self::One)
    }

    /// Appends tokens in all lists, or in none. Returns the copies to make.
    pub fn append<'t>(
        &mut self,
        batch: &mut Batch,
        tokens: impl Into<Tokens<'t>>,
    ) -> Result<Vec<GroupCopy>, SequenceError> {
        match self {
            Self::One(sequence) => batch.append(sequence, tokens).map(|_| Vec::new()),
            Self::Grouped(sequence) => Ok(batch.append_grouped(sequence, tokens)?.copies),
        }
    }

    /// Keeps its states, and returns the copies to make.
    pub fn checkpoint(&mut self, batch: &mut Batch) -> Result<Vec<GroupCopy>, SequenceError> {
        match self {
            Self::One(_) => Ok(Vec::new()),
            Self::Grouped(sequence) => batch.checkpoint(sequence),
        }
    }

    /// Sets when its session is expected to send the next request.
    pub fn expect_return(&mut self, at: Millis) {
        match self {
            Self::One(sequence) => sequence.expect_return(at),
            Self::Grouped(sequence) => sequence.expect_return(at),
        }
    }

    /// Returns the length at which its states can be kept next.
    pub fn next_cut(&self) -> Option<usize> {
        match self {
            Self::One(_) => None,
            Self::Grouped(sequence) => sequence.next_cut(),
        }
    }

    /// Returns the frames of its states.
    pub fn state_frames(&self) -> impl Iterator<Item = usize> {
        let (sequence, states) = match self {
            Self::One(_) => (None, 0),
            Self::Grouped(sequence) => (Some(sequence), sequence.states()),
        };
        (0..states).flat_map(move |state| sequence.into_iter().flat_map(move |it| it.state(state)))
    }

    /// Returns the number of its lists.
    pub fn lists(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Grouped(sequence) => sequence.groups(),
        }
    }

    /// Returns one of its lists, for tables and slots.
    pub fn list(&self, list: usize) -> &Sequence {
        match self {
            Self::One(sequence) => sequence,
            Self::Grouped(sequence) => sequence.group(list),
        }
    }

    /// Returns the number of its tokens.
    pub fn len(&self) -> usize {
        self.list(0).len()
    }

    /// Returns the blocks that it must allocate to grow from one length to another.
    pub fn lacks(&self, tokens: Range<u64>) -> usize {
        let of_list =
            |list: &Sequence| added(&tokens, list.block_tokens()).saturating_sub(list.reserved_blocks());
        (0..self.lists()).map(|list| of_list(self.list(list))).sum()
    }

    /// Returns the blocks reserved in all lists.
    pub fn reserved_blocks(&self) -> usize {
        (0..self.lists()).map(|list| self.list(list).reserved_blocks()).sum()
    }

    /// Returns the blocks of a list that it holds, with those reserved.
    pub fn held_blocks(&self, list: usize) -> usize {
        let list = self.list(list);
        list.block_count() - list.blocks_given_up() + list.reserved_blocks()
    }
}
