//! Checkpoints of states: when they can be kept, and how.

use crate::block::{AllocRequest, ListEnd};
use crate::error::SequenceError;
use crate::ids::{BlockId, SessionId};
use crate::prefix::BlockHash;
use crate::sync::call;

use super::batch::Batch;
use super::grouped::GroupedSequence;
use super::plan::Growth;
use super::registry::Sequences;
use super::sessions::Checkpoint;
use super::state::{GroupCopy, State};
use super::token_hashes::TokenHashes;

/// The hashes of the blocks of checkpoints, and the era of each.
pub(super) type Checkpoints = Vec<(Vec<BlockHash>, u64)>;

impl GroupedSequence {
    /// Returns the length at which to end a chunk of the announced tokens, so that a
    /// [checkpoint](Batch::checkpoint) there serves later requests: where the prompt leaves the
    /// [cached prefix](Self::cached_prefix), if no state was kept there, and then the last boundary
    /// of blocks before the last announced token. `None`: there is none ahead, or the pool has no
    /// states or no prefix cache.
    pub fn next_cut(&self) -> Option<usize> {
        let first = &self.parts[0];
        let block_tokens = first.sequences.boundary_tokens();
        let end = first.announced().saturating_sub(1) / block_tokens * block_tokens;
        let cuts = [self.cached.min(end), end];
        cuts.into_iter().find(|&cut| cut > self.len()).filter(|_| !self.states.is_empty())
    }

    /// Returns the number of tokens at admission whose blocks were cached in all groups. The
    /// sequence began with fewer if no state was kept behind them: other prompts had them too, so
    /// that a checkpoint there will probably be hit.
    pub fn cached_prefix(&self) -> usize {
        self.cached
    }

    /// Returns the hashes of each state behind all tokens. `None`: they cannot be found, or are.
    fn checkpoint_hashes(&self) -> Option<Vec<TokenHashes>> {
        let first = &self.parts[0];
        let ((known, cache), tokens) = (first.token_hashes()?, first.list.tokens());
        let block_tokens = first.kind.block_tokens;
        let is_final = first.committed == tokens && known.era() == cache.era();
        let is_computed = !self.states.iter().any(|state| state.is_to_be_restored() || state.at != tokens);
        let is_boundary = (tokens as usize).is_multiple_of(first.sequences.boundary_tokens());
        if !is_final || !is_computed || !is_boundary {
            return None;
        }
        let behind = (tokens / block_tokens) as usize;
        let (lists, sizes) = (first.sequences.kinds().len(), first.sequences.states().iter().enumerate());
        let hashes: Option<Vec<_>> =
            sizes.map(|(state, &size)| known.of_state(lists, behind, state, size)).collect();
        let is_cached = |hashes: &TokenHashes| {
            let all = hashes.hashes();
            cache.count_prefix(first.pool_blocks(), all, known.era()).0 == all.len()
        };
        hashes.filter(|hashes| !hashes.iter().all(is_cached))
    }

    /// Returns the checkpoint behind all tokens.
    fn new_checkpoint(&self) -> Option<Checkpoint> {
        let (known, _) = self.parts[0].token_hashes()?;
        Checkpoint::new(known, self.len() / self.parts[0].sequences.block_tokens(), 0)
    }

    /// Demotes the checkpoint that a new one dominates: of its session; or, while memory is short,
    /// the last one before that at which it was hit.
    fn demote_dominated(&self, new: &Checkpoint) -> Option<()> {
        let first = &self.parts[0];
        let dominated = match self.session {
            Some(session) => first.sequences.0.sessions.dominated_by(session, new),
            // It may look for long.
            None if first.pool_blocks().counts().free()
                >= 2 * first.sequences.states().iter().sum::<usize>() =>
            {
                None
            }
            None => {
                let (known, _) = first.token_hashes()?;
                let before = (self.hit / first.sequences.block_tokens()).checked_sub(1)?;
                let (behind, _) = first.sequences.find_checkpoint(known, 0, before);
                Checkpoint::new(known, behind, 1)
            }
        };
        first.sequences.demote(&dominated?);
        Some(())
    }

    fn note_checkpoint(&self, new: Checkpoint) {
        let sequences = &self.parts[0].sequences;
        let is_cached = |kept: &Checkpoint| sequences.hits_of(kept).is_some();
        self.session.into_iter().for_each(|session| sequences.0.sessions.add(session, new, is_cached));
    }

    /// Closes the states; those behind whole blocks become checkpoints without a copy.
    pub(super) fn close_states(&mut self) {
        let hashes = if self.states.is_empty() { None } else { self.checkpoint_hashes() };
        let states = std::mem::take(&mut self.states);
        match hashes {
            Some(hashes) => {
                if let Some(new) = self.new_checkpoint() {
                    self.demote_dominated(&new);
                    self.note_checkpoint(new);
                }
                states.into_iter().zip(hashes).for_each(|(state, known)| state.into_checkpoint(known))
            }
            None => drop(states),
        }
    }
}

impl Sequences {
    /// Returns the number of hits of a checkpoint; `None` if it is not cached.
    fn hits_of(&self, checkpoint: &Checkpoint) -> Option<u32> {
        self.cache()?.hits_of(&self.0.blocks, checkpoint.hash(0, 0), checkpoint.era)
    }

    /// Makes a checkpoint evict-first, unless others than its session have hit it. Hints on the
    /// session are no longer about it.
    fn demote(&self, checkpoint: &Checkpoint) {
        if let (Some(cache), Some(hinted)) = (self.cache(), self.0.hinted.as_deref()) {
            self.leave(cache, &mut hinted.pins(), &self.blocks_of(checkpoint), checkpoint.era);
        }
        if let (Some(cache), Some(hits)) = (self.cache(), self.hits_of(checkpoint))
            && hits <= checkpoint.hits
        {
            let hashes = self.blocks_of(checkpoint);
            cache.demote(&self.0.blocks, &hashes, checkpoint.era, |_, _| false);
        }
    }

    /// Returns [the checkpoints of a session](Self::checkpoints_of) that have at most `room` blocks
    /// together, the newest first, and the others.
    pub(super) fn checkpoints_within(
        &self,
        session: SessionId,
        mut room: usize,
    ) -> (Checkpoints, Checkpoints) {
        let mut kept = self.checkpoints_of(session);
        kept.reverse();
        let fits = |(hashes, _): &&(Vec<BlockHash>, u64)| {
            let rest = room.checked_sub(hashes.len());
            room = rest.unwrap_or(0);
            rest.is_some()
        };
        let within = kept.iter().take_while(fits).count();
        let others = kept.split_off(within);
        (kept, others)
    }

    fn blocks_of(&self, checkpoint: &Checkpoint) -> Vec<BlockHash> {
        let of =
            |(state, &blocks): (usize, &usize)| (0..blocks).map(move |block| checkpoint.hash(state, block));
        self.states().iter().enumerate().flat_map(of).collect()
    }

    /// Returns the hashes of the blocks of each checkpoint that a session keeps, and its era.
    pub(super) fn checkpoints_of(&self, session: SessionId) -> Checkpoints {
        let kept = self.0.sessions.kept(session);
        kept.iter().map(|checkpoint| (self.blocks_of(checkpoint), checkpoint.era)).collect()
    }
}

impl Batch {
    /// Keeps the states of a sequence, so that prompts with the same tokens can be hit here.
    /// Returns the copies: in a pool with storage, it has made or enqueued them; otherwise the
    /// engine makes them, behind the batch's own work on the sequence and before later work. Empty:
    /// no copies are needed, because the states are cached already; or none can be found, because
    /// tokens are unknown or not final, a block was uncached, the cache was cleared, or the pool
    /// has no states or no prefix cache. Also before the first append behind a cached prefix, and
    /// behind accepted drafts, over which only the next append steps the states.
    ///
    /// The copies are found when the batch has ended. They are evicted like other cached blocks;
    /// those that a later checkpoint dominates, before these: see
    /// [`AdmitRequest::session`](crate::AdmitRequest::session). When a sequence is closed at such a
    /// length, its states are kept without a copy.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] if the sequence does not end with a full block: see
    /// [`GroupedSequence::next_cut`]. [`SequenceError::Alloc`] if there are no blocks for the
    /// copies, [`SequenceError::ForeignSequence`]. Nothing has changed, except that the checkpoint
    /// which this one would have dominated is evicted before others.
    pub fn checkpoint(&mut self, sequence: &mut GroupedSequence) -> Result<Vec<GroupCopy>, SequenceError> {
        let _call = call();
        let id = sequence.id();
        self.check(&sequence.parts[0].sequences, id)?;
        sequence.catch_up();
        if sequence.states.is_empty() {
            return Ok(Vec::new());
        }
        let first = &sequence.parts[0];
        let (length, block_tokens) = (first.list.tokens() as usize, first.kind.block_tokens);
        let boundary_tokens = first.sequences.boundary_tokens();
        if length == 0 || !length.is_multiple_of(boundary_tokens) {
            let limit = format_args!("a multiple of {boundary_tokens}");
            return Err(SequenceError::invalid(id, "tokens before a checkpoint", length, limit));
        }
        let Some(hashes) = sequence.checkpoint_hashes() else { return Ok(Vec::new()) };
        let needed = hashes.iter().map(|hashes| hashes.hashes().len()).sum();
        let request = AllocRequest::new(needed).sequence(id).priority(sequence.parts[0].priority());
        let mut blocks: Vec<BlockId> = Vec::with_capacity(needed);
        let pool = sequence.parts[0].pool_blocks();
        let new = sequence.new_checkpoint();
        // Before the allocation, which may evict it.
        new.as_ref().and_then(|new| sequence.demote_dominated(new));
        let end = ListEnd { tenant: sequence.parts[0].tenant, ..ListEnd::default() };
        pool.allocate_listed(&request, Some(end), &mut |id| blocks.push(id))?;
        let mut rest = &blocks[..];
        let copy = |(state, hashes): (&State, TokenHashes)| {
            let (own, others) = rest.split_at(hashes.hashes().len());
            rest = others;
            state.checkpoint(hashes, own)
        };
        let mut made: Vec<_> = sequence.states.iter().zip(hashes).map(copy).collect();
        for (_, copies) in &made {
            // SAFETY: the copy was just allocated and has no other owner. The run is written only
            // through the sequence, which is borrowed mutably, and work on a stream is in order.
            unsafe { self.copy_frames(&copies.frames) }?;
        }
        new.into_iter().for_each(|new| sequence.note_checkpoint(new));
        for (copy, _) in &mut made {
            let tokens = copy.list.tokens() as usize;
            let growth = Growth::plan(0, 0, tokens, block_tokens).expect("the builder checks states");
            self.step.note(copy, 0, None);
            self.make_final(copy, &growth);
        }
        Ok(made.into_iter().map(|(_, copies)| copies).collect())
    }
}
