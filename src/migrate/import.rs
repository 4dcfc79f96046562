//! The target's half of a transfer.
//!
//! ```text
//! manifest  ->  Import: blocks are reserved, cached ones shared; the id of a sequence is taken
//!                 -> pieces, to be granted to the source       or bytes, written by `write`
//!                 -> verify: the places whose bytes are wrong, to be sent again
//!                    or arrived: the caller has verified them
//!                 -> commit: the sequence is open here, the cached blocks can be found
//!                 -> drop: everything is as before
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::block::Blocks;
use crate::error::{AllocError, Invalid, TransferError};
use crate::ids::{BlockHandle, BlockId, SequenceId};
use crate::prefix::{BlockHash, KvEvent, Origin, PrefixCache, Since, in_group, is_older};
use crate::sequence::{
    AnySequence, Arrival, BlockRefs, GroupedSequence, Outline, PromptBlock, ResumeOptions, Sequence,
};
use crate::storage::Storage;
use crate::storage::backend::check;

use super::checksum::{checksum, checksums};
use super::form::PackedForm;
use super::gather::Gather;
use super::heads::HeadRange;
use super::held::{HeldBlocks, Piece, Refs, not_transferred};
use super::manifest::{
    CachedBlock, CachedBlocks, Contents, Manifest, check_distinct, check_origins, check_same_form,
    other_hashing,
};
use super::route::End;
use super::transfers::TransferDirection;

/// Blocks reserved in a pool for what arrives. Dropping the import gives them back, and the id of
/// its sequence. Blocks that a transport [holds](Piece) stay owned until it drops the hold.
#[must_use = "dropping an import gives its blocks back"]
pub struct Import {
    held: Arc<HeldBlocks>,
    arriving: Arriving,
    missing: Vec<u32>,
    /// Blocks computed here before a clear.
    stale: usize,
    /// The missing places that were not yet found to be right.
    unverified: BTreeSet<u32>,
    /// Checksum of each place; none between pools of one process, or if the caller verifies.
    checksums: Vec<u64>,
    /// Whether the caller [states](Self::arrived) which bytes are right.
    is_stated: bool,
    /// For sources whose split of the heads differs.
    gather: Option<Gather>,
}

enum Arriving {
    Sequence(Box<Arrival>),
    Cached(Cached),
    Committed,
}

struct Cached {
    blocks: Vec<CachedBlock>,
    is_chain: bool,
    /// Era in which they are noted; `None` if nothing may be found by their hashes.
    era: Option<u64>,
    /// The newest uncache call before the bytes were read.
    since: u64,
}

/// Result of a committed import.
#[derive(Debug)]
#[non_exhaustive]
pub enum Imported {
    /// A sequence, open in this pool.
    Sequence(Box<Sequence>),
    /// A sequence with several groups of layers, open in this pool.
    Grouped(Box<GroupedSequence>),
    /// Number of cached blocks that the source's pool need not keep.
    Cached(usize),
}

impl Imported {
    /// Returns the sequence, if it is one of one list.
    pub fn sequence(self) -> Option<Sequence> {
        match self {
            Self::Sequence(sequence) => Some(*sequence),
            Self::Grouped(_) | Self::Cached(_) => None,
        }
    }

    /// Returns the sequence, of any number of lists.
    pub fn into_grouped(self) -> Option<GroupedSequence> {
        match self {
            Self::Sequence(sequence) => Some(GroupedSequence::of_one(*sequence)),
            Self::Grouped(sequence) => Some(*sequence),
            Self::Cached(_) => None,
        }
    }
}

/// Creates the event for a cached block that arrived, by its place in the manifest.
pub(super) type Stored<'a> = &'a dyn Fn(usize, BlockId) -> Option<Box<KvEvent>>;

impl Import {
    pub(crate) fn new(end: &End, manifest: &Manifest) -> Result<Self, TransferError> {
        manifest.check()?;
        let form = PackedForm::of(end.storage.layout());
        check_same_form(manifest.form(), &form)?;
        Self::of_form(end, manifest)
    }

    /// Prepares the target of a manifest for a pool that holds these heads of the model.
    pub(crate) fn of_heads(end: &End, manifest: &Manifest, own: HeadRange) -> Result<Self, TransferError> {
        manifest.check()?;
        let form = PackedForm::of(end.storage.layout());
        let mut gather = Gather::new(form, own)?;
        gather.add(manifest)?;
        let mut import = Self::of_form(end, manifest)?;
        // The manifest's are those of the source's heads.
        import.checksums = Vec::new();
        import.gather = Some(gather);
        Ok(import)
    }

    fn of_form(end: &End, manifest: &Manifest) -> Result<Self, TransferError> {
        end.check_alive()?;
        let print = |cache: &PrefixCache| manifest.hashing() == Some(cache.hasher().fingerprint());
        let agrees = end.sequences.cache().is_some_and(|cache| print(cache));
        if let Contents::Sequence(outline) = manifest.contents() {
            outline.check_groups(&end.sequences)?;
        }
        if let Some(cache) = end.sequences.cache().filter(|_| agrees) {
            manifest.check_hashes(cache)?;
        }
        let mut import = match manifest.contents() {
            Contents::Sequence(outline) => {
                Self::sequence(end, outline.clone().hashed_alike(agrees), end.era())?
            }
            Contents::Cached(_) if !agrees => return Err(other_hashing().into()),
            Contents::Cached(cached) => {
                cached.check_groups(&end.sequences)?;
                Self::cached(end, cached, end.era())?
            }
        };
        // A checksum for each place.
        let (blocks, wanted) = (import.held.ids().len(), manifest.blocks());
        if blocks != wanted {
            let limit = format_args!("{blocks}, as in the target");
            return Err(Invalid::new("blocks", wanted, limit).into());
        }
        import.checksums = manifest.checksums().to_vec();
        import.unverified = import.missing.iter().copied().collect();
        Ok(import)
    }

    /// Prepares the target of a chain's cached blocks from `first` on, which the caller verifies.
    pub(crate) fn prefix(end: &End, first: u32, hashes: &[BlockHash]) -> Result<Self, TransferError> {
        end.check_alive()?;
        let depth = |place: u32| first.saturating_add(place);
        let block = |(place, &hash)| CachedBlock { hash, depth: depth(place), origins: Vec::new(), group: 0 };
        Self::stated(end, (0..).zip(hashes).map(block).collect())
    }

    /// Prepares the target of blocks that a prompt needs, which the caller verifies.
    pub(crate) fn needed(end: &End, needed: &[PromptBlock]) -> Result<Self, TransferError> {
        end.check_alive()?;
        let block = |&PromptBlock { hash, depth, group, .. }: &PromptBlock| CachedBlock {
            hash,
            depth,
            origins: Vec::new(),
            group,
        };
        Self::stated(end, needed.iter().map(block).collect())
    }

    fn stated(end: &End, blocks: Vec<CachedBlock>) -> Result<Self, TransferError> {
        let cached = CachedBlocks::new(&end.sequences, blocks, true);
        check_distinct(&cached.blocks)?;
        let mut import = Self::cached(end, &cached, end.era())?;
        import.is_stated = true;
        import.unverified = import.missing.iter().copied().collect();
        Ok(import)
    }

    /// Prepares the target of a sequence; `era` is that of the cache before the sequence was read.
    pub(super) fn sequence(end: &End, outline: Outline, era: u64) -> Result<Self, TransferError> {
        let mut arrival = Arrival::open(outline, &end.sequences, era, ResumeOptions::new())?;
        let refs = arrival.take_now(false)?;
        Ok(Self::arriving(end, arrival, refs))
    }

    pub(super) fn arriving(end: &End, arrival: Arrival, refs: BlockRefs) -> Self {
        let id = arrival.id();
        let ids: Vec<_> = refs.blocks.iter().copied().map(Some).collect();
        let missing = arrival.missing();
        Self::reserved(end, Some(id), ids, refs, missing, Arriving::Sequence(Box::new(arrival)))
    }

    /// Prepares the target of cached blocks: as many of those missing here as fit. Skips those
    /// computed here before a clear, and what follows them in a chain. Replaces blocks from before
    /// a clear of their source.
    pub(super) fn cached(end: &End, cached: &CachedBlocks, era: u64) -> Result<Self, TransferError> {
        let (cache, pool) = (end.cache()?, end.sequences.blocks());
        let mut refs = BlockRefs::new(&end.sequences);
        let (mut ids, mut missing) = (vec![None; cached.blocks.len()], Vec::new());
        let (mut stale, mut outdated) = (0, Vec::new());
        for (place, block) in cached.blocks.iter().enumerate() {
            let is_stale = !cache.accepts_in(era, &block.origins);
            stale += usize::from(is_stale);
            if is_stale || stale > 0 && cached.is_chain {
                continue;
            }
            // Referenced, so that it stays here while the source evicts it.
            ids[place] = cache.take(pool, block.hash, era);
            if let Some(id) = ids[place]
                && cache.has_origins()
                && is_older(&cache.origins_of(id), &block.origins)
            {
                cache.untake(pool, &[id], false);
                outdated.push(block.hash);
                ids[place] = None;
            }
            match ids[place] {
                Some(id) => refs.blocks.push(id),
                None => missing.push(place as u32),
            }
        }
        if !outdated.is_empty() {
            cache.uncache_hashes(pool, &outdated);
        }
        let present = refs.blocks.len();
        let room = match missing.len() {
            0 => 0,
            wanted => match refs.allocate_up_to(wanted) {
                Ok(room) => room,
                // This pool has lost all its blocks: the source must keep them.
                Err(error @ AllocError::DeviceLost { .. }) => return Err(error.into()),
                Err(_) if present > 0 && !cached.is_chain => 0,
                Err(error) => return Err(error.into()),
            },
        };
        missing.truncate(room);
        for (&place, &id) in missing.iter().zip(&refs.blocks[present..]) {
            ids[place as usize] = Some(id);
        }
        let CachedBlocks { blocks, is_chain, .. } = cached.clone();
        // Whatever is written from here on is newer than these calls.
        let arriving =
            Arriving::Cached(Cached { blocks, is_chain, era: Some(era), since: cache.uncached().newest() });
        let mut import = Self::reserved(end, None, ids, refs, missing, arriving);
        import.stale = stale;
        Ok(import)
    }

    fn reserved(
        end: &End,
        sequence: Option<SequenceId>,
        ids: Vec<Option<BlockId>>,
        refs: BlockRefs,
        missing: Vec<u32>,
        arriving: Arriving,
    ) -> Self {
        let held = HeldBlocks::new(end, TransferDirection::Import, sequence, ids, Refs::Listed(refs));
        let (unverified, checksums, is_stated) = (BTreeSet::new(), Vec::new(), false);
        let held = Arc::new(held);
        Self { held, arriving, missing, stale: 0, unverified, checksums, is_stated, gather: None }
    }

    /// Returns the places of the manifest whose bytes must be transferred, ascending.
    pub fn missing(&self) -> &[u32] {
        &self.missing
    }

    /// Returns the places of the manifest that this pool has or reserved a block for, ascending:
    /// all of a sequence, and as many cached blocks as there is room for.
    pub fn accepted(&self) -> Vec<u32> {
        (0..).zip(self.held.ids()).filter(|(_, id)| id.is_some()).map(|(place, _)| place).collect()
    }

    /// Returns the id of the arriving sequence; `None` for cached blocks.
    pub fn sequence_id(&self) -> Option<SequenceId> {
        if let Arriving::Sequence(arrival) = &self.arriving { Some(arrival.id()) } else { None }
    }

    /// Returns the number of blocks that are cached here and need not be transferred.
    pub fn shared_blocks(&self) -> usize {
        self.held.ids().iter().flatten().count() - self.missing.len()
    }

    /// Returns the number of cached blocks rejected because they were computed here before a clear.
    pub fn stale_blocks(&self) -> usize {
        self.stale
    }

    /// States the [origins](super::export::Export::origins) of a missing cached block; none so far.
    ///
    /// # Errors
    /// [`TransferError::Stale`] if it was computed here before a clear: drop the import.
    /// [`TransferError::Invalid`] for another place, for a sequence, and for origins out of order.
    pub fn set_origins(&mut self, place: u32, origins: &[Origin]) -> Result<(), TransferError> {
        self.check_missing(&[place])?;
        check_origins(origins)?;
        let Arriving::Cached(cached) = &mut self.arriving else {
            return Err(not_transferred(place).into());
        };
        let cache = self.held.end().cache()?;
        if cached.era.is_some_and(|era| !cache.accepts_in(era, origins)) {
            return Err(TransferError::Stale { place });
        }
        cached.blocks[place as usize].origins = origins.to_vec();
        Ok(())
    }

    /// Returns the blocks of the accepted places, in order.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.held.ids().iter().flatten().copied().collect()
    }

    /// Returns the storage into which the bytes go.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.held.end().storage
    }

    /// Returns the frames of the missing blocks at these places of the manifest, for a transport to
    /// write in the packed form of this pool. Then they must be [verified](Self::verify), or
    /// [stated](Self::arrived) to be right, even if they were before.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for a block that is not missing, and for sources with other
    /// heads, whose bytes must be [written](Self::write) block by block.
    pub fn piece(&mut self, places: &[u32]) -> Result<Piece, TransferError> {
        if self.gather.is_some() {
            let got = "blocks whose heads come from several sources";
            return Err(Invalid::new("piece", got, "one block at a time, by `write`").into());
        }
        self.check_missing(places)?;
        let piece = self.held.open_piece(places)?;
        // Their next writer may compute no checksums.
        self.held.take_arrived(&[]);
        if !self.checksums.is_empty() || self.is_stated {
            self.unverified.extend(places);
        }
        Ok(piece)
    }

    /// States that the caller has verified, by a checksum of its own, that the bytes of a missing
    /// block are in its frame and belong to its hash. Only for an import of
    /// [hashes](crate::Pool::import_prefix).
    ///
    /// # Errors
    /// [`TransferError::InTransfer`] while a transport has a hold; [`TransferError::Invalid`] for a
    /// block that is not missing, or if there is a manifest.
    pub fn arrived(&mut self, place: u32) -> Result<(), TransferError> {
        if !self.is_stated {
            return Err(
                Invalid::new("block", "one of an import with a manifest", "one of `import_prefix`").into()
            );
        }
        self.check_missing(&[place])?;
        self.held.exclusive()?;
        self.unverified.remove(&place);
        Ok(())
    }

    fn check_missing(&self, places: &[u32]) -> Result<(), TransferError> {
        match places.iter().find(|place| self.missing.binary_search(place).is_err()) {
            Some(&place) => Err(not_transferred(place).into()),
            None => Ok(()),
        }
    }

    /// Adds a further source of the same sequence, which holds other heads of it.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for another sequence, for heads that do not fit, and if this
    /// import was not [prepared](crate::Pool::import_heads) for several sources.
    pub fn add_source(&mut self, manifest: &Manifest) -> Result<(), TransferError> {
        manifest.check()?;
        match &mut self.gather {
            Some(gather) => {
                gather.add(manifest)?;
                if let (Arriving::Sequence(arrival), Contents::Sequence(outline)) =
                    (&mut self.arriving, manifest.contents())
                {
                    arrival.join(&outline.lists);
                }
                Ok(())
            }
            None => Err(Invalid::new("import", "one for all heads of a source", "one for several").into()),
        }
    }

    /// Writes the packed bytes of a missing block, and verifies them. With several sources, `from`
    /// are the heads of the manifest with these bytes; all heads complete the block.
    ///
    /// # Errors
    /// The block is still missing: [`TransferError::Invalid`] for another block, a wrong number of
    /// bytes or unknown heads, [`TransferError::InTransfer`], [`TransferError::Checksum`],
    /// [`TransferError::Storage`].
    pub fn write(&mut self, place: u32, from: Option<HeadRange>, bytes: &[u8]) -> Result<(), TransferError> {
        self.check_missing(&[place])?;
        let runs = self.held.open_piece(&[place])?.runs;
        let end = self.held.exclusive()?.end().clone();
        self.held.take_arrived(&[]);
        let Some(gather) = &mut self.gather else {
            check::packed_bytes(bytes.len(), end.storage.layout().packed_bytes())?;
            let is_wrong = || self.checksums.get(place as usize) != Some(&checksum(bytes));
            if !self.checksums.is_empty() && is_wrong() {
                return Err(TransferError::Checksum { place });
            }
            // SAFETY: the block belongs to this import alone, and no transport has a hold on it.
            let done = unsafe { end.storage.unpack(&runs, bytes) };
            done.inspect_err(|error| end.note_loss(error))?;
            self.unverified.remove(&place);
            return Ok(());
        };
        let from = gather.check(from, place, bytes)?;
        let mut packed = vec![0; end.storage.layout().packed_bytes()];
        // SAFETY: as above.
        let done = unsafe { end.storage.pack(&runs, &mut packed) };
        done.inspect_err(|error| end.note_loss(error))?;
        gather.insert(from, bytes, &mut packed);
        // SAFETY: as above.
        let done = unsafe { end.storage.unpack(&runs, &packed) };
        done.inspect_err(|error| end.note_loss(error))?;
        if gather.arrived(place, from) {
            self.unverified.remove(&place);
        }
        Ok(())
    }

    /// Returns the places to be transferred again: they have not arrived, or do not match the
    /// manifest's checksum. Reads the bytes of all blocks not verified before.
    ///
    /// # Errors
    /// [`TransferError::InTransfer`] while a transport has a hold, [`TransferError::Storage`].
    pub fn verify(&mut self) -> Result<Vec<u32>, TransferError> {
        self.held.exclusive()?;
        if self.gather.is_none() && !self.is_stated {
            self.verify_checksums()?;
        }
        Ok(self.unverified.iter().copied().collect())
    }

    fn verify_checksums(&mut self) -> Result<(), TransferError> {
        let end = self.held.end().clone();
        let places: Vec<u32> = self.unverified.iter().copied().collect();
        let arrived = self.held.take_arrived(&places);
        let unread = places.iter().zip(&arrived).filter(|(_, sum)| sum.is_none());
        let runs = self.held.open_piece(&unread.map(|(&place, _)| place).collect::<Vec<_>>())?.runs;
        // SAFETY: the blocks belong to this import alone, and no transport has a hold on them.
        let done = unsafe { checksums(&*end.storage, &runs) };
        let mut read = done.inspect_err(|error| end.note_loss(error))?.into_iter();
        for (place, sum) in places.iter().zip(arrived) {
            let sum = sum.or_else(|| read.next());
            if sum.is_some() && sum.as_ref() == self.checksums.get(*place as usize) {
                self.unverified.remove(place);
            }
        }
        Ok(())
    }

    /// Drops the hashes of the tokens, by which blocks are then no longer found unless they were
    /// before: the source's cache was [cleared](super::export::Export::is_current) meanwhile.
    pub fn forget(&mut self) {
        match &mut self.arriving {
            Arriving::Sequence(arrival) => arrival.forget(),
            Arriving::Cached(cached) => cached.era = None,
            Arriving::Committed => {}
        }
    }

    /// Completes the transfer: the sequence is open in this pool, or the blocks are in its cache.
    ///
    /// # Errors
    /// [`TransferError::InTransfer`] while a transport has a hold, [`TransferError::Incomplete`]
    /// before blocks were [verified](Self::verify); with the unchanged import.
    pub fn commit(mut self) -> Result<Imported, ImportError> {
        match self.commit_as(&|_, _| None) {
            Ok((imported, _)) => Ok(imported),
            Err(error) => Err(ImportError { error, import: Box::new(self) }),
        }
    }

    /// Commits; also returns the references on cached blocks, which the caller drops.
    pub(super) fn commit_as(&mut self, stored: Stored<'_>) -> Result<(Imported, BlockRefs), TransferError> {
        if !self.unverified.is_empty() {
            return Err(TransferError::Incomplete { missing: self.unverified.len() });
        }
        let held = self.held.exclusive()?;
        let mut refs = held.take_refs();
        let end = held.end().clone();
        match std::mem::replace(&mut self.arriving, Arriving::Committed) {
            Arriving::Sequence(arrival) => {
                let sequence = arrival.commit(refs);
                let imported = match end.sequences.has_one_list() {
                    true => Imported::Sequence(Box::new(Sequence::of_lists(sequence))),
                    false => Imported::Grouped(Box::new(sequence)),
                };
                Ok((imported, BlockRefs::new(&end.sequences)))
            }
            Arriving::Cached(cached) => {
                let count = refs.blocks.len();
                self.register(&cached, &end, stored)?;
                if !cached.is_chain {
                    // Released last first, so that the coldest are evicted first here too.
                    refs.blocks.reverse();
                }
                Ok((Imported::Cached(count), refs))
            }
            Arriving::Committed => Err(TransferError::Incomplete { missing: 0 }),
        }
    }

    /// Makes the arrived blocks findable.
    fn register(&self, cached: &Cached, end: &End, stored: Stored<'_>) -> Result<(), TransferError> {
        let (cache, pool): (_, &Blocks) = (end.cache()?, end.sequences.blocks());
        let Some(era) = cached.era else { return Ok(()) };
        let arrived = || {
            self.missing.iter().filter_map(|&place| Some((place as usize, self.held.ids()[place as usize]?)))
        };
        let mut last = None;
        for (place, id) in arrived() {
            let CachedBlock { hash, depth, origins, group } = &cached.blocks[place];
            if last.as_ref().is_none_or(|&(of, _)| of != origins) {
                last = Some((origins, cache.provenance(origins)));
            }
            let mark = last.as_ref().map_or(0, |(_, provenance)| provenance.mark);
            cache.note(id, *hash, era, *depth, in_group(mark, *group));
            // In the form of this pool: cached blocks come from one source.
            if let Some(&sum) = self.checksums.get(place) {
                cache.note_sum(id, sum);
            }
        }
        let event = |(place, id)| -> (BlockHandle, _) { (pool.handle(id), stored(place, id)) };
        cache.register(pool, Since::Written(cached.since), arrived().map(event));
        Ok(())
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        self.held.quarantine();
    }
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import")
            .field("missing", &self.missing.len())
            .field("unverified", &self.unverified.len())
            .finish_non_exhaustive()
    }
}

/// An import that could not be committed.
#[derive(Debug, thiserror::Error)]
#[error("the blocks were not imported: {error}")]
pub struct ImportError {
    /// The cause.
    pub error: TransferError,
    /// The import, unchanged.
    pub import: Box<Import>,
}
