//! Access to the bytes of a sequence's tokens, without `unsafe`.
//!
//! # Why this is sound
//!
//! [The frame rule](crate::storage::Storage#the-frame-rule): nothing else accesses a slot that is
//! written, and no thread writes a slot that is read.
//! - A store writes, through `&mut`, to blocks whose only reference the sequence holds: no
//!   other store to them, load, or new reference can exist meanwhile. They are neither sealed nor
//!   promised to another batch, so nothing moves them.
//! - A load holds `&` of a sequence with a reference on each block, so there is no store through
//!   this sequence, and other sequences' stores are rejected because of the second reference. Once
//!   that is released, its Release and the Acquire of the check order the load before the store.
//! - A freed block's frame reaches its next owner through a Release and an Acquire.
//!
//! On a device these calls first wait for work enqueued on the batch's stream. The engine must
//! order its own enqueued work.
//!
//! # Tiles
//!
//! A tile is a slice of a block's memory, which borrows the batch and the sequence:
//!
//! ```text
//! who could write            why not, while `&[T]` lives
//! this sequence              it is borrowed: no append, store, truncate, or drop. A fork may begin: a second reference
//! a sequence that shares     this sequence's reference is one of two: the other is rejected, and copies
//! a handle, a lease          a handle changes no bytes, and no lease has a block of a sequence's list
//! a move                     reads the old frame. The batch read the block's word after it began, so that this frame, if
//!                            the block leaves it, is retired until the batch ends; it is borrowed
//! a shrink, an eviction      take frames without owner and not retired
//! ```
//!
//! `&mut [T]` is given out for a block whose only reference this sequence has, which is open, or
//! promised to this batch. Moving, sealing or sharing it requires the sequence or the end
//! of the batch, and both are borrowed mutably. The writer is recorded first, so that the block is
//! not sealed before the batch has ended.
//!
//! A shared block is rejected while it is not full of final tokens: the engine's own work may still
//! be writing it. A full one need not be sealed yet: that may wait for another thread's batch.
//!
//! The slices cover only the sequence's tokens: the rest of the block may have bytes of other
//! owners. All host memory is initialised, and every bit pattern is an element. References are
//! released only by their holders, see the [parent module](super). Callers of the storage's own
//! `unsafe` operations must keep the frame rule towards these calls too.

use std::ops::Range;

use crate::block::BlockWord;
use crate::error::{SequenceError, StorageError};
use crate::ids::{BlockId, Run};
use crate::storage::backend::check;
use crate::storage::{Element, Elements, ElementsMut, HostTile, Storage};

use super::batch::Batch;
use super::grouped::GroupedSequence;
use super::plan::pieces;
use super::sequence::{Access, Sequence};

impl GroupedSequence {
    /// Returns where the bytes of a state are, frame by frame.
    fn state_runs(&self, state: usize) -> Result<Vec<Run>, SequenceError> {
        let Some(of) = self.states.get(state) else {
            let limit = format_args!("less than {}", self.states.len());
            return Err(SequenceError::invalid(self.id(), "state", state, limit));
        };
        let frame = |id| self.parts[0].pool_blocks().frame(id);
        Ok(of.latest().map(|id| Run { start: frame(id), len: 1 }).collect())
    }
}

impl Batch {
    /// Stores K and V of tokens in one layer, as in [`Storage::store`].
    ///
    /// The tokens must have been appended in this batch, or be in a block that is not full, and the
    /// sequence must not have been forked since.
    ///
    /// # Errors
    /// [`SequenceError::NotWritable`] names the first token in a block that is shared, sealed, or
    /// promised to another batch; [`SequenceError::Invalid`], [`SequenceError::ForeignSequence`],
    /// [`SequenceError::NoStorage`], [`SequenceError::Storage`]. No byte was written.
    pub fn store(
        &mut self,
        sequence: &mut Sequence,
        layer: usize,
        tokens: Range<usize>,
        k: Elements<'_>,
        v: Elements<'_>,
    ) -> Result<(), SequenceError> {
        self.fill_slots(sequence, tokens.clone())?;
        self.byte_storage()?;
        let tokens_u32 = tokens.start as u32..tokens.end as u32;
        let block_tokens = sequence.kind.block_tokens;
        for (place, inside) in pieces(tokens_u32, block_tokens) {
            let block = sequence.list.id(place as usize);
            if !self.may_write(sequence, place, self.step.sequences.0.blocks.word(block)) {
                let position = (place * block_tokens + inside.start) as usize;
                return Err(SequenceError::NotWritable { id: sequence.id(), position, block });
            }
        }
        self.writes_again(sequence, tokens.start as u32);
        let storage = self.byte_storage()?;
        // SAFETY: the blocks belong to this sequence alone, which is borrowed mutably; no thread
        // seals or moves them: see the module.
        let stored = self.settled(storage).and_then(|()| unsafe { storage.store(layer, k, v, &self.slots) });
        Ok(self.step.sequences.noting_loss(stored)?)
    }

    /// Loads K and V of tokens in one layer: the inverse of [`store`](Self::store).
    ///
    /// # Errors
    /// As [`store`](Self::store), without [`SequenceError::NotWritable`]. Nothing was loaded.
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

    /// Returns K and V of the sequence's `index`th block in one layer, where they are stored.
    ///
    /// The slices are `[tokens][kv_heads][head_dim]`, with the sequence's tokens in the block; V is
    /// empty in a latent layout. Elements of a quantised layout are codes, with
    /// [scales](Self::tile_scales).
    ///
    /// While the slices live, blocks may move, and other sequences may share the block; the slices
    /// stay valid and unchanged. Tokens appended but not yet stored have unspecified bytes.
    ///
    /// ```
    /// use kvpool::{Dtype, KvLayout, Pool, SequenceId};
    ///
    /// let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32).build()?;
    /// let pool = Pool::builder(layout).blocks(100).build()?;
    /// let mut sequence = pool.sequence(SequenceId(1)).open()?;
    /// let mut batch = pool.begin_batch();
    /// batch.append(&mut sequence, 6)?;
    /// let (k, v) = batch.tile_mut::<f32>(&mut sequence, 1, 1)?; // tokens 4 and 5
    /// k.fill(1.0);
    /// v.fill(2.0);
    /// assert_eq!(batch.tile::<f32>(&sequence, 1, 1)?, (&[1.0; 8][..], &[2.0; 8][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`SequenceError::NotReadable`] for a block that is shared and not yet full of final tokens;
    /// [`SequenceError::Invalid`] if there is no such block; [`SequenceError::Storage`] if there is
    /// no such layer, the processor cannot reach the memory, or the element type differs;
    /// [`SequenceError::ForeignSequence`], [`SequenceError::NoStorage`].
    pub fn tile<'a, T: Element>(
        &'a self,
        sequence: &'a Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(&'a [T], &'a [T]), SequenceError> {
        let (tile, tokens) = self.readable(sequence, layer, index)?;
        let [k, v] = tile.rows(tokens)?;
        // SAFETY: initialised memory of the block's frame, which no thread writes and which has no
        // other owner while batch and sequence are borrowed: see the module.
        Ok(unsafe { (k.as_ref(), v.as_ref()) })
    }

    /// Returns K and V of one block in one layer, as [`tile`](Self::tile), for writing.
    ///
    /// Write what [`store`](Self::store) would have stored: in the dtype of the layout, for tokens
    /// that were appended before, and with dynamic [scales](Self::tile_scales_mut).
    ///
    /// # Errors
    /// As [`tile`](Self::tile), but [`SequenceError::NotWritable`], which names the block's first
    /// token, for a block that is shared, sealed, or promised to another batch.
    pub fn tile_mut<'a, T: Element>(
        &'a mut self,
        sequence: &'a mut Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(&'a mut [T], &'a mut [T]), SequenceError> {
        let (tile, tokens) = self.writable(sequence, layer, index)?;
        let [mut k, mut v] = tile.rows(tokens)?;
        self.writes_again(sequence, index as u32 * sequence.kind.block_tokens);
        // SAFETY: initialised, disjoint memory of the block's frame, which no other thread accesses
        // while batch and sequence are borrowed mutably: see the module.
        Ok(unsafe { (k.as_mut(), v.as_mut()) })
    }

    /// Returns the dynamic scales of K and V of one block in one layer: `[tokens][kv_heads]`.
    ///
    /// # Errors
    /// As [`tile`](Self::tile); [`SequenceError::Storage`] in a layout without dynamic scales.
    pub fn tile_scales<'a>(
        &'a self,
        sequence: &'a Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(&'a [f32], &'a [f32]), SequenceError> {
        let (tile, tokens) = self.readable(sequence, layer, index)?;
        let [k, v] = tile.scale_rows(tokens)?;
        // SAFETY: as in `tile`.
        Ok(unsafe { (k.as_ref(), v.as_ref()) })
    }

    /// Returns the dynamic scales of K and V of one block in one layer, for writing.
    ///
    /// # Errors
    /// As [`tile_mut`](Self::tile_mut) and [`tile_scales`](Self::tile_scales).
    pub fn tile_scales_mut<'a>(
        &'a mut self,
        sequence: &'a mut Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(&'a mut [f32], &'a mut [f32]), SequenceError> {
        let (tile, tokens) = self.writable(sequence, layer, index)?;
        let [mut k, mut v] = tile.scale_rows(tokens)?;
        self.writes_again(sequence, index as u32 * sequence.kind.block_tokens);
        // SAFETY: as in `tile_mut`.
        Ok(unsafe { (k.as_mut(), v.as_mut()) })
    }

    /// Stores the bytes of a [state](GroupedSequence::state), packed frame by frame. If this batch is
    /// abandoned, the sequence begins again.
    ///
    /// # Errors
    /// [`SequenceError::NotWritable`] while a transfer reads the state; [`SequenceError::Invalid`] if
    /// there is no such state, or it is that of a cached prefix before the first append, which
    /// restores it; [`SequenceError::ForeignSequence`], [`SequenceError::NoStorage`], and
    /// [`SequenceError::Storage`] for another number of bytes. Nothing was stored.
    pub fn store_state(
        &mut self,
        sequence: &mut GroupedSequence,
        state: usize,
        bytes: &[u8],
    ) -> Result<(), SequenceError> {
        self.check(&sequence.parts[0].sequences, sequence.id())?;
        sequence.catch_up();
        let (id, position) = (sequence.id(), sequence.len());
        let runs = sequence.state_runs(state)?;
        let of = &mut sequence.states[state];
        if of.is_to_be_restored() {
            return Err(SequenceError::invalid(id, "state", "one to be restored", "one behind an append"));
        }
        if let Some(block) = of.shared() {
            return Err(SequenceError::NotWritable { id, position, block });
        }
        let storage = self.byte_storage()?;
        let packed = check::packed_bytes(bytes.len(), runs.len() * storage.layout().packed_bytes());
        packed.map_err(StorageError::from)?;
        self.step.note(&mut of.run, 0, None);
        let storage = self.byte_storage()?;
        // SAFETY: the run belongs to this sequence alone, which is borrowed mutably; it is not sealed,
        // so it does not move, and no transfer reads it.
        let stored = self.settled(storage).and_then(|()| unsafe { storage.unpack(&runs, bytes) });
        Ok(self.step.sequences.noting_loss(stored)?)
    }

    /// Loads the bytes of a state: the inverse of [`store_state`](Self::store_state). Before the first
    /// append behind a cached prefix, they are those of the checkpoint.
    ///
    /// # Errors
    /// As [`store_state`](Self::store_state). Nothing was loaded.
    pub fn load_state(
        &self,
        sequence: &GroupedSequence,
        state: usize,
        bytes: &mut [u8],
    ) -> Result<(), SequenceError> {
        self.check(&sequence.parts[0].sequences, sequence.id())?;
        let (runs, storage) = (sequence.state_runs(state)?, self.byte_storage()?);
        // SAFETY: the sequence is borrowed, and writes its run only through `&mut`. A checkpoint is
        // sealed; where it moves, this batch keeps the frames that it reads.
        let loaded = self.settled(storage).and_then(|()| unsafe { storage.pack(&runs, bytes) });
        Ok(self.step.sequences.noting_loss(loaded)?)
    }

    fn readable(
        &self,
        sequence: &Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(HostTile, usize), SequenceError> {
        let (block, word) = self.block_at(sequence, index)?;
        // Full of final tokens: sealed, or sealed as soon as its writers' batches have ended.
        let full = (sequence.committed / sequence.kind.block_tokens).max(sequence.seals.settled());
        if word.refs() != 1 && !word.is_sealed() && index as u32 >= full {
            return Err(SequenceError::NotReadable { id: sequence.id(), index, block });
        }
        // SAFETY: the callers read through `&` of the sequence: see the module.
        unsafe { self.host_tile(sequence, layer, index, word) }
    }

    fn writable(
        &self,
        sequence: &mut Sequence,
        layer: usize,
        index: usize,
    ) -> Result<(HostTile, usize), SequenceError> {
        let (block, word) = self.block_at(sequence, index)?;
        if !self.may_write(sequence, index as u32, word) {
            let position = index * sequence.kind.block_tokens as usize;
            return Err(SequenceError::NotWritable { id: sequence.id(), position, block });
        }
        // SAFETY: the callers write through `&mut` of the sequence and the batch: see the module.
        unsafe { self.host_tile(sequence, layer, index, word) }
    }

    /// Returns whether a block of this mutably borrowed sequence may be written.
    fn may_write(&self, sequence: &Sequence, place: u32, word: BlockWord) -> bool {
        // Withdraw: promised to this batch, which cannot end while it is borrowed here.
        matches!(sequence.access(place, word, self.ticket()), Access::Open | Access::Withdraw)
    }

    fn block_at(&self, sequence: &Sequence, index: usize) -> Result<(BlockId, BlockWord), SequenceError> {
        let (id, blocks) = (sequence.id(), sequence.block_count());
        self.check(&sequence.sequences, id)?;
        if index >= blocks {
            let limit = format_args!("less than {blocks}");
            return Err(SequenceError::invalid(id, "index of the block", index, limit));
        }
        let begin = index * sequence.kind.block_tokens as usize;
        sequence.check_kept(begin..begin + 1)?;
        let block = sequence.list.id(index);
        Ok((block, self.step.sequences.0.blocks.word(block)))
    }

    /// Returns the memory of a block's frame, and the number of its tokens.
    ///
    /// # Safety
    /// The word was read under this batch; the frame rule, for every access through the result.
    unsafe fn host_tile(
        &self,
        sequence: &Sequence,
        layer: usize,
        index: usize,
        word: BlockWord,
    ) -> Result<(HostTile, usize), SequenceError> {
        self.check_layout(sequence)?;
        let (storage, block_tokens) = (self.byte_storage()?, sequence.kind.block_tokens as usize);
        // SAFETY: the caller's promise.
        let tile = self.settled(storage).and_then(|()| unsafe { storage.tile(layer, word.frame()) });
        let tile = self.step.sequences.noting_loss(tile)?;
        Ok((tile, (sequence.len() - index * block_tokens).min(block_tokens)))
    }

    /// Waits for the work enqueued on the batch's stream, including copies on write.
    fn settled(&self, storage: &dyn Storage) -> Result<(), StorageError> {
        self.step.stream.as_ref().map_or(Ok(()), |stream| storage.settle(stream))
    }

    fn byte_storage(&self) -> Result<&dyn Storage, SequenceError> {
        self.step.sequences.0.storage.as_deref().ok_or(SequenceError::NoStorage)
    }

    /// Returns an error if the blocks of a list have other tokens than those of the layout: only the
    /// engine knows what lies in them.
    fn check_layout(&self, sequence: &Sequence) -> Result<(), SequenceError> {
        let (has, of) = (sequence.block_tokens(), self.byte_storage()?.layout().block_tokens());
        match has == of {
            true => Ok(()),
            false => Err(SequenceError::invalid(sequence.id(), "tokens of a block", has, of)),
        }
    }

    fn fill_slots(&mut self, sequence: &Sequence, tokens: Range<usize>) -> Result<(), SequenceError> {
        if self.step.sequences.0.storage.is_some() {
            self.check_layout(sequence)?;
        }
        let mut slots = std::mem::take(&mut self.slots);
        slots.clear();
        let filled = self.slot_mapping(sequence, tokens, &mut slots);
        self.slots = slots;
        filled
    }
}
