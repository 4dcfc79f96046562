//! Checkpoints of states: when they can be kept, and how.

use crate::block::{AllocRequest, ListEnd};
use crate::error::SequenceError;
use crate::ids::BlockId;
use crate::sync::call;

use super::batch::Batch;
use super::grouped::GroupedSequence;
use super::plan::Growth;
use super::state::{State, StateCopy};
use super::token_hashes::TokenHashes;

impl GroupedSequence {
    /// Returns the length at which to end a chunk of the announced tokens, so that a
    /// [checkpoint](Batch::checkpoint) there serves later requests: where the prompt leaves the
    /// [cached prefix](Self::cached_prefix), if no state was kept there, and then the last boundary of
    /// blocks before the last announced token. `None`: there is none ahead, or the pool has no states
    /// or no prefix cache.
    pub fn next_cut(&self) -> Option<usize> {
        let first = &self.parts[0];
        let block_tokens = first.sequences.block_tokens();
        let end = first.announced().saturating_sub(1) / block_tokens * block_tokens;
        let cuts = [self.cached.min(end), end];
        cuts.into_iter().find(|&cut| cut > self.len()).filter(|_| !self.states.is_empty())
    }

    /// Returns the number of tokens at admission whose blocks were cached in all groups. The sequence
    /// began with fewer if no state was kept behind them: other prompts had them too, so that a
    /// checkpoint there will probably be hit.
    pub fn cached_prefix(&self) -> usize {
        self.cached
    }

    /// Returns the hashes of each state behind all tokens. `None`: they cannot be found, or are.
    fn checkpoint_hashes(&self) -> Option<Vec<TokenHashes>> {
        let first = &self.parts[0];
        let ((known, cache), tokens) = (first.token_hashes()?, first.list.tokens());
        let block_tokens = first.sequences.0.block_tokens;
        let is_final = first.committed == tokens && known.era() == cache.era();
        let is_computed = !self.states.iter().any(State::is_to_be_restored);
        if !is_final || !is_computed || !tokens.is_multiple_of(block_tokens) {
            return None;
        }
        let behind = (tokens / block_tokens) as usize;
        let sizes = first.sequences.states().iter().enumerate();
        let hashes: Option<Vec<_>> =
            sizes.map(|(state, &size)| known.of_state(behind, state, size)).collect();
        let is_cached = |hashes: &TokenHashes| {
            let all = hashes.hashes();
            cache.count_prefix(first.pool_blocks(), all, known.era()).0 == all.len()
        };
        hashes.filter(|hashes| !hashes.iter().all(is_cached))
    }

    /// Evicts the last checkpoint before the one that it was hit at: if memory is short, only that
    /// one and the next are worth their blocks.
    fn evict_dominated(&self) -> Option<()> {
        let first = &self.parts[0];
        let ((known, cache), pool) = (first.token_hashes()?, first.pool_blocks());
        let before = (self.hit / first.sequences.block_tokens()).checked_sub(1)?;
        for (state, &size) in first.sequences.states().iter().enumerate() {
            let (behind, _) = first.sequences.find_checkpoint(known, state, before);
            let hashes = known.of_state(behind, state, size)?;
            pool.evict_these(cache.evictable_of(pool, hashes.hashes(), known.era()));
        }
        Some(())
    }

    /// Closes the states; those behind whole blocks become checkpoints without a copy.
    pub(super) fn close_states(&mut self) {
        let hashes = if self.states.is_empty() { None } else { self.checkpoint_hashes() };
        let states = std::mem::take(&mut self.states);
        match hashes {
            Some(hashes) => {
                states.into_iter().zip(hashes).for_each(|(state, known)| state.into_checkpoint(known))
            }
            None => drop(states),
        }
    }
}

impl Batch {
    /// Keeps the states of a sequence, so that prompts with the same tokens can be hit here. Returns
    /// the copies that the engine makes, behind the batch's own work on the sequence and before
    /// later work. Empty: no copies are needed, because the states are cached already; or none can be
    /// found, because tokens are unknown or not final, a block was uncached, the cache was cleared, or
    /// the pool has no states or no prefix cache. Also before the first append behind a cached prefix.
    ///
    /// The copies are found when the batch has ended. They are evicted like other cached blocks.
    /// When a sequence is closed at such a length, its states are kept without a copy.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] if the sequence does not end with a full block: see
    /// [`GroupedSequence::next_cut`]. [`SequenceError::Alloc`] if there are no blocks for the copies,
    /// [`SequenceError::ForeignSequence`]. Nothing has changed, except that an older checkpoint of the
    /// prompt may have been evicted.
    pub fn checkpoint(&mut self, sequence: &mut GroupedSequence) -> Result<Vec<StateCopy>, SequenceError> {
        let _call = call();
        let id = sequence.id();
        self.check(&sequence.parts[0].sequences, id)?;
        sequence.catch_up();
        if sequence.states.is_empty() {
            return Ok(Vec::new());
        }
        let (length, block_tokens) = (sequence.len(), sequence.parts[0].sequences.0.block_tokens);
        if length == 0 || !length.is_multiple_of(block_tokens as usize) {
            let limit = format_args!("a multiple of {block_tokens}");
            return Err(SequenceError::invalid(id, "tokens before a checkpoint", length, limit));
        }
        let Some(hashes) = sequence.checkpoint_hashes() else { return Ok(Vec::new()) };
        let needed = hashes.iter().map(|hashes| hashes.hashes().len()).sum();
        let request = AllocRequest::new(needed).sequence(id).priority(sequence.parts[0].priority());
        let mut blocks: Vec<BlockId> = Vec::with_capacity(needed);
        let pool = sequence.parts[0].pool_blocks();
        if pool.counts().free() < 2 * needed {
            sequence.evict_dominated();
        }
        pool.allocate_listed(&request, Some(ListEnd::default()), &mut |id| blocks.push(id))?;
        let mut rest = &blocks[..];
        let mut copies = Vec::with_capacity(hashes.len());
        for (state, hashes) in sequence.states.iter().zip(hashes) {
            let (own, others) = rest.split_at(hashes.hashes().len());
            rest = others;
            let (mut copy, made) = state.checkpoint(hashes, own);
            copies.push(made);
            let tokens = own.len() * block_tokens as usize;
            let growth = Growth::plan(0, 0, tokens, block_tokens).expect("the builder checks states");
            self.step.note(&mut copy, 0);
            self.make_final(&mut copy, &growth);
        }
        Ok(copies)
    }
}
