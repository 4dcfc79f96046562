//! The source's half of a transfer.
//!
//! ```text
//! sequence, or cached blocks  ->  Export  -> manifest
//!                                         -> pieces, to be given to a transport
//!                                         -> finish: the source is closed, or evicted      the target has committed
//!                                         -> cancel: everything is as before
//! ```

use std::sync::Arc;

use crate::error::{Invalid, TransferError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::{BlockHash, ColdBlock, Origin};
use crate::sequence::{AnySequence, BlockRefs, GroupedSequence, Outline, Sequence, Sequences};
use crate::storage::Storage;

use super::checksum::checksums;
use super::error::MigrateError;
use super::form::PackedForm;
use super::heads::HeadRange;
use super::held::{ColdBlocks, Finished, HeldBlocks, Piece, Refs};
use super::manifest::{CachedBlock, CachedBlocks, Contents, Manifest};
use super::route::End;
use super::transfers::TransferDirection;

/// Bytes whose blocks are pinned at once for their checksums.
const PIECE_BYTES: usize = 64 << 20;

/// Blocks on their way to another pool: a sequence, or cached blocks, each with a reference.
///
/// The sequence is part of the export, so that nothing writes it; if only a copy of it is exported,
/// its next write to a block goes to a copy. Dropping the export closes the sequence; cached blocks
/// return to their places. A transport's [hold](Piece) on blocks outlives that.
#[must_use = "dropping an export closes its sequence"]
pub struct Export<S: AnySequence = Sequence> {
    /// Dropped before the sequence: one that is closed or continues finds its blocks unshared.
    held: Departing,
    contents: Contents,
    sequence: Option<S>,
    heads: Option<HeadRange>,
    /// Era of the cache when its hashes were read.
    era: u64,
}

impl<S: AnySequence> Export<S> {
    /// Exports a sequence that stays open.
    pub(crate) fn copy_of(end: &End, sequence: &S) -> Result<Self, TransferError> {
        let era = end.era();
        let refs = sequence.lists().depart(&end.sequences)?;
        let outline = sequence.lists().outline();
        let ids = refs.blocks.iter().copied().map(Some).collect();
        let id = Some(sequence.id());
        let held = HeldBlocks::new(end, TransferDirection::Export, id, ids, Refs::Listed(refs));
        Ok(Self::new(held, Contents::Sequence(outline), era))
    }

    /// Exports a sequence that is closed at the end.
    pub(crate) fn of(end: &End, sequence: S) -> Result<Self, MigrateError<S>> {
        match Self::copy_of(end, &sequence) {
            Ok(mut export) => {
                export.sequence = Some(sequence);
                Ok(export)
            }
            Err(error) => Err(MigrateError { error, sequence: Box::new(sequence) }),
        }
    }

    fn new(held: HeldBlocks, contents: Contents, era: u64) -> Self {
        Self { held: Departing(Arc::new(held)), contents, sequence: None, heads: None, era }
    }

    /// Returns it as one of any number of lists, which
    /// [`Remote::send`](super::remote::Remote::send) takes.
    pub fn into_grouped(self) -> Export<GroupedSequence> {
        let Self { held, contents, sequence, heads, era } = self;
        Export { held, contents, sequence: sequence.map(AnySequence::into_lists), heads, era }
    }
}

impl Export<GroupedSequence> {
    /// Returns it as one of a sequence of one list, or of cached blocks; unchanged if it is of a
    /// sequence of several lists.
    pub fn into_one(self) -> Result<Export, Box<Self>> {
        if self.outline().is_some_and(|outline| (outline.lists.len(), outline.states.len()) != (1, 0)) {
            return Err(Box::new(self));
        }
        let Self { held, contents, sequence, heads, era } = self;
        Ok(Export { held, contents, sequence: sequence.map(AnySequence::of_lists), heads, era })
    }
}

impl Export {
    /// Exports up to `wanted` evictable blocks, in eviction order.
    pub(crate) fn coldest(end: &End, wanted: usize) -> Result<Self, TransferError> {
        let era = end.era();
        let cold = ColdBlocks::coldest(end, wanted)?;
        let cache = end.cache()?;
        let block = |cold: &ColdBlock| CachedBlock {
            hash: cold.hash,
            depth: cold.depth,
            origins: cache.origins_of(cold.id),
            group: cold.group,
        };
        let blocks = cold.cold.iter().map(block).collect();
        let ids = cold.cold.iter().map(|cold| Some(cold.id)).collect();
        let held = HeldBlocks::new(end, TransferDirection::Export, None, ids, Refs::Cold(cold));
        Ok(Self::new(held, Contents::Cached(CachedBlocks::new(&end.sequences, blocks, false)), era))
    }

    /// Exports the cached blocks with these hashes, up to the first uncached one: a part of a
    /// chain, or of what a prompt needs in every group of layers.
    pub(crate) fn prefix(
        end: &End,
        hashes: impl IntoIterator<Item = BlockHash>,
    ) -> Result<Self, TransferError> {
        let (cache, era) = (end.cache()?, end.era());
        let (mut refs, mut blocks) = (BlockRefs::new(&end.sequences), Vec::new());
        for hash in hashes {
            let Some(id) = cache.take_to_carry(end.sequences.blocks(), hash, era) else { break };
            refs.blocks.push(id);
            let (depth, group) = cache.place_of(id);
            blocks.push(CachedBlock { hash, depth, origins: cache.origins_of(id), group });
        }
        let ids = refs.blocks.iter().copied().map(Some).collect();
        let held = HeldBlocks::new(end, TransferDirection::Export, None, ids, Refs::Listed(refs));
        Ok(Self::new(held, Contents::Cached(CachedBlocks::new(&end.sequences, blocks, true)), era))
    }
}

impl<S: AnySequence> Export<S> {
    fn end(&self) -> &End {
        self.held.end()
    }

    pub(crate) fn is_of(&self, sequences: &Sequences) -> bool {
        self.end().sequences.same(sequences)
    }

    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }

    pub(super) fn outline(&self) -> Option<&Outline> {
        if let Contents::Sequence(outline) = &self.contents { Some(outline) } else { None }
    }

    /// Returns the outline of a sequence for another pool of this process.
    pub(super) fn outline_for(&self, to: &End) -> Outline {
        let Contents::Sequence(outline) = &self.contents else { unreachable!("cached blocks") };
        let (from, to) = (self.end().sequences.cache(), to.sequences.cache());
        let agrees = from.zip(to).is_some_and(|(from, to)| to.hasher().agrees_with(from.hasher()));
        outline.clone().hashed_alike(agrees)
    }

    /// States the heads that this pool holds, for pools of another tensor-parallel split.
    ///
    /// # Errors
    /// [`Invalid`] if a block holds another number of heads.
    pub fn set_heads(&mut self, heads: HeadRange) -> Result<(), Invalid> {
        heads.check(self.end().storage.layout().kv_heads() as u32)?;
        self.heads = Some(heads);
        Ok(())
    }

    /// Returns the manifest, with checksums: reads all blocks; on a device it waits for the copies.
    pub fn manifest(&self) -> Result<Manifest, TransferError> {
        let end = self.end();
        let form = PackedForm::of(end.storage.layout());
        let mut sums = Vec::with_capacity(self.held.ids().len());
        let places: Vec<u32> = (0..self.held.ids().len() as u32).collect();
        // A piece keeps its blocks in their frames, so that it is a small part of the whole.
        for places in places.chunks((PIECE_BYTES / end.storage.layout().packed_bytes()).max(1)) {
            let piece = self.piece(places)?;
            // SAFETY: no thread writes the blocks, which keep their frames while the piece lives.
            let done = unsafe { checksums(&*end.storage, &piece.runs) };
            sums.extend(done.inspect_err(|error| end.note_loss(error))?);
        }
        let hashing = end.sequences.cache().map(|cache| cache.hasher().fingerprint());
        Ok(Manifest::new(form, hashing, self.heads, self.contents.clone(), sums))
    }

    /// Returns the hashes of the cached blocks whose bytes no longer match those that arrived here,
    /// by a manifest of this export: the memory was damaged. Does not check blocks computed here.
    /// Drop the export, then [uncache](crate::Pool::uncache) the blocks.
    pub fn damaged(&self, manifest: &Manifest) -> Vec<BlockHash> {
        let (Contents::Cached(cached), Ok(cache)) = (&self.contents, self.end().cache()) else {
            return Vec::new();
        };
        let blocks = self.held.ids().iter().zip(manifest.checksums()).zip(&cached.blocks);
        let is_damaged = |id: &Option<BlockId>, got: u64| {
            id.and_then(|id| cache.sum(id)).is_some_and(|arrived| arrived != got)
        };
        blocks.filter(|((id, got), _)| is_damaged(id, **got)).map(|(_, block)| block.hash).collect()
    }

    /// Returns the packed bytes of a block.
    pub fn packed(&self, place: u32) -> Result<Vec<u8>, TransferError> {
        let (end, piece) = (self.end(), self.piece(&[place])?);
        let mut bytes = vec![0; end.storage.layout().packed_bytes()];
        // SAFETY: no thread writes the block, which stays in its frame while the piece lives.
        let done = unsafe { end.storage.pack(&piece.runs, &mut bytes) };
        done.inspect_err(|error| end.note_loss(error))?;
        Ok(bytes)
    }

    /// Returns the id of the exported sequence; `None` for cached blocks.
    pub fn sequence(&self) -> Option<SequenceId> {
        self.outline().map(|outline| outline.id)
    }

    /// Returns whether the export owns the sequence, and closes it at the end; false for a copy.
    pub fn owns_sequence(&self) -> bool {
        self.sequence.is_some()
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.held.ids().iter().flatten().count()
    }

    /// Returns whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its blocks, in the order of the manifest.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.held.ids().iter().flatten().copied().collect()
    }

    /// Returns the hashes of cached blocks, also those not [retained](Self::retain), in order.
    pub fn hashes(&self) -> Vec<BlockHash> {
        match &self.contents {
            Contents::Cached(cached) => cached.blocks.iter().map(|block| block.hash).collect(),
            Contents::Sequence(_) => Vec::new(),
        }
    }

    /// Returns the origins of the cached block at this place of the manifest; none for a sequence.
    /// A store outside of any pool passes them to
    /// [`set_origins`](super::import::Import::set_origins).
    pub fn origins(&self, place: usize) -> &[Origin] {
        match &self.contents {
            Contents::Cached(cached) => cached.blocks.get(place).map_or(&[], |block| &block.origins),
            Contents::Sequence(_) => &[],
        }
    }

    /// Returns the storage with the bytes.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.end().storage
    }

    /// Pins the blocks at these places of the manifest while the [hold](Piece::hold) lives.
    pub fn piece(&self, places: &[u32]) -> Result<Piece, TransferError> {
        self.held.pinned_piece(places)
    }

    /// Keeps only the cached blocks at these places of the manifest, which the target has
    /// [accepted](super::import::Import::accepted), and returns the others to the cache:
    /// [`finish`](Self::finish) would evict them. No effect on a sequence or a prompt.
    ///
    /// # Errors
    /// [`TransferError::Invalid`], [`TransferError::InTransfer`]; nothing changes.
    pub fn retain(&mut self, places: &[u32]) -> Result<(), TransferError> {
        self.held.exclusive()?.retain(places)
    }

    /// Returns whether the prefix cache was not cleared since the export began.
    ///
    /// Ask just before the commit, and [forget](super::import::Import::forget) the tokens if it
    /// was: a target that is cleared too must not find what was known before.
    pub fn is_current(&self) -> bool {
        self.end().era() == self.era
    }

    /// Ends the export after the target has committed: closes the sequence, or evicts the cached
    /// blocks. Leaves the blocks of a copy and of a prefix alone.
    pub fn finish(mut self) -> Finished {
        self.held.give_up()
    }

    /// Ends the export without a transfer: returns the sequence, or puts cached blocks back.
    pub fn cancel(mut self) -> Option<S> {
        self.sequence.take()
    }
}

/// The blocks of an export. Dropping it releases them, except those that transports hold.
struct Departing(Arc<HeldBlocks>);

impl std::ops::Deref for Departing {
    type Target = Arc<HeldBlocks>;

    fn deref(&self) -> &Arc<HeldBlocks> {
        &self.0
    }
}

impl std::ops::DerefMut for Departing {
    fn deref_mut(&mut self) -> &mut Arc<HeldBlocks> {
        &mut self.0
    }
}

impl Drop for Departing {
    fn drop(&mut self) {
        self.0.quarantine();
    }
}

impl<S: AnySequence> std::fmt::Debug for Export<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = self.outline().map(|outline| outline.id);
        f.debug_struct("Export").field("sequence", &id).field("blocks", &self.len()).finish_non_exhaustive()
    }
}
