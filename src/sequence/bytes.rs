//! Access to the bytes of a sequence's tokens, without `unsafe`.
//!
//! # Why this is sound
//!
//! [The frame rule](crate::storage::Storage#the-frame-rule) requires that no other access touches a
//! slot that is written, and that no thread writes a slot that is read.
//! - A store writes to blocks of which the sequence holds the only reference, through `&mut`: no
//!   other store to them, no load through this sequence, and no new reference can exist meanwhile.
//!   The blocks are neither sealed nor promised to another batch, so nothing moves them.
//! - A load holds `&` of a sequence with a reference on each block, so there is no store through
//!   this sequence. Through another sequence the block has two references, and the store is
//!   refused. Once the other reference is released, its Release and the Acquire of the check order
//!   the load before the store.
//! - A freed block's frame reaches its next owner through a Release and an Acquire.
//!
//! On a device these calls wait for work enqueued on the batch's stream before. The engine must
//! order its own enqueued work.
//!
//! All of this relies on references being released only by their holders, see the [parent
//! module](super). Callers of the storage's own `unsafe` operations must keep the frame rule
//! towards these calls too.

use std::ops::Range;

use crate::error::{SequenceError, StorageError};
use crate::storage::{Elements, ElementsMut, Storage};

use super::batch::Batch;
use super::plan::pieces;
use super::sequence::{Access, Sequence};

impl Batch {
    /// Stores K and V of tokens in one layer.
    ///
    /// Each has the shape `[tokens][kv_heads][head_dim]`, as in [`Storage::store`]. The tokens must
    /// have been appended in this batch, or be in a block that is not full, and the sequence must
    /// not have been forked since.
    ///
    /// # Errors
    ///
    /// No byte was written: [`SequenceError::NotWritable`] names the first token in a block that is
    /// shared, sealed, or promised to another batch; [`SequenceError::TokensOutOfRange`],
    /// [`SequenceError::ForeignSequence`], [`SequenceError::NoStorage`],
    /// [`SequenceError::Storage`].
    pub fn store(
        &mut self,
        sequence: &mut Sequence,
        layer: usize,
        tokens: Range<usize>,
        k: Elements<'_>,
        v: Elements<'_>,
    ) -> Result<(), SequenceError> {
        self.fill_slots(sequence, tokens.clone())?;
        let storage = self.byte_storage()?;
        let ticket = self.ticket();
        let tokens_u32 = tokens.start as u32..tokens.end as u32;
        let block_tokens = self.step.sequences.0.block_tokens;
        for (place, inside) in pieces(tokens_u32, block_tokens) {
            let block = sequence.list.id(place as usize);
            let access = sequence.access(place, self.step.sequences.0.blocks.word(block), ticket);
            // Withdraw: promised to this batch, which cannot end while it is borrowed here.
            if !matches!(access, Access::Open | Access::Withdraw) {
                let position = (place * block_tokens + inside.start) as usize;
                return Err(SequenceError::NotWritable { id: sequence.id(), position, block });
            }
        }
        sequence.seals.wrote_again(ticket);
        self.step.sequences.0.blocks.clock().note(&mut sequence.writers, self.step.batch());
        // SAFETY: the blocks belong to this sequence alone, which is borrowed mutably; no thread
        // seals or moves them: see the module.
        let stored = self.settled(storage).and_then(|()| unsafe { storage.store(layer, k, v, &self.slots) });
        Ok(self.step.sequences.noting_loss(stored)?)
    }

    /// Loads K and V of tokens in one layer: the inverse of [`store`](Self::store).
    ///
    /// # Errors
    ///
    /// Nothing was loaded: [`SequenceError::TokensOutOfRange`], [`SequenceError::ForeignSequence`],
    /// [`SequenceError::NoStorage`], [`SequenceError::Storage`].
    pub fn load(
        &mut self,
        sequence: &Sequence,
        layer: usize,
        tokens: Range<usize>,
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), SequenceError> {
        self.fill_slots(sequence, tokens)?;
        let storage = self.byte_storage()?;
        // SAFETY: the sequence holds a reference on each block and is borrowed; such a block is
        // written only through its only owner, borrowed mutably: see the module.
        let loaded = self.settled(storage).and_then(|()| unsafe { storage.load(layer, &self.slots, k, v) });
        Ok(self.step.sequences.noting_loss(loaded)?)
    }

    /// Waits for the work enqueued on the batch's stream, including copies on write.
    fn settled(&self, storage: &dyn Storage) -> Result<(), StorageError> {
        self.step.stream.as_ref().map_or(Ok(()), |stream| storage.settle(stream))
    }

    fn byte_storage(&self) -> Result<&dyn Storage, SequenceError> {
        self.step.sequences.0.storage.as_deref().ok_or(SequenceError::NoStorage)
    }

    fn fill_slots(&mut self, sequence: &Sequence, tokens: Range<usize>) -> Result<(), SequenceError> {
        let mut slots = std::mem::take(&mut self.slots);
        slots.clear();
        let filled = self.slot_mapping(sequence, tokens, &mut slots);
        self.slots = slots;
        filled
    }
}
