//! Parts of copies that arrive at this node, and the import that they share.
//!
//! A rank of another tensor-parallel split sends all of its heads. The blocks arrive in a
//! [staging](super::staging); from there, only this node's heads are copied to the import, block by
//! block.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};

use kvpool::transfer::{HeadRange, Import, Imported, Manifest};
use kvpool::{GroupedSequence, Pool, Run, SequenceId, TransferError};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{OwnedPermit, Sender};

use super::arrival::Arrival;
use super::staging::{Staged, StagingError, Stagings};
use super::work::{self, Piece, Reserved, Verified, text};
use crate::protocol::{CopyNumber, CopyPart, ManifestBytes, Part, PartFault, Places, Refusal, Text};

#[derive(Default)]
pub(super) struct PartCopies {
    own: Option<(HeadRange, Arc<Stagings>)>,
    imports: HashMap<CopyNumber, Weak<Gathering>>,
}

pub(super) struct Gathering {
    own: HeadRange,
    stagings: Arc<Stagings>,
    state: Mutex<Gathered>,
}

#[derive(Default)]
struct Gathered {
    import: Option<Import>,
    sources: Vec<HeadRange>,
    place: Option<OwnedPermit<Arrival<GroupedSequence>>>,
}

pub(super) struct PartImport {
    gathering: Arc<Gathering>,
    heads: HeadRange,
    sequence: Option<SequenceId>,
    /// Places that have not arrived, each with the index of its staged frame.
    missing: Vec<(u32, u32)>,
    staged: Option<Arc<Staged>>,
}

impl PartCopies {
    /// Enables parts; `own` are the heads of this node.
    pub(super) fn new(own: HeadRange, stagings: Stagings) -> Self {
        Self { own: Some((own, Arc::new(stagings))), imports: HashMap::new() }
    }

    /// Returns the shared state of a copy; `None` if this node does not know its heads.
    pub(super) fn gathering(&mut self, copy: CopyNumber) -> Option<Arc<Gathering>> {
        let (own, stagings) = self.own.clone()?;
        self.imports.retain(|_, gathering| gathering.strong_count() > 0);
        if let Some(gathering) = self.imports.get(&copy).and_then(Weak::upgrade) {
            return Some(gathering);
        }
        let gathering = Arc::new(Gathering { own, stagings, state: Mutex::default() });
        self.imports.insert(copy, Arc::downgrade(&gathering));
        Some(gathering)
    }
}

impl Gathering {
    fn state(&self) -> MutexGuard<'_, Gathered> {
        self.state.lock()
    }

    /// Reserves a slot for the arriving sequence, unless another part of the copy did.
    pub(super) fn reserve_place(
        &self,
        arrivals: Sender<Arrival<GroupedSequence>>,
    ) -> Result<(), TrySendError<()>> {
        let mut state = self.state();
        if state.place.is_none() {
            state.place = Some(arrivals.try_reserve_owned().map_err(|error| match error {
                TrySendError::Full(_) => TrySendError::Full(()),
                TrySendError::Closed(_) => TrySendError::Closed(()),
            })?);
        }
        Ok(())
    }

    /// Adds the manifest of a part to the import. The first part begins the import.
    fn join(&self, pool: &Pool, manifest: &Manifest) -> Result<(Vec<u32>, Vec<u32>), TransferError> {
        let mut state = self.state();
        match &mut state.import {
            Some(import) => import.add_source(manifest)?,
            None => state.import = Some(pool.import_heads(manifest, self.own)?),
        }
        state.sources.extend(manifest.heads());
        let import = state.import.as_ref().unwrap_or_else(|| unreachable!("set above"));
        Ok((import.missing().to_vec(), import.accepted()))
    }

    /// Checks that the parts have all heads of this node, once all are here.
    fn check_heads(&self, part: Part) -> Result<(), PartFault> {
        let sources = &self.state().sources;
        if sources.len() < usize::from(part.of) {
            return Ok(());
        }
        let common = sources.iter().filter_map(|source| source.common(&self.own));
        let held: BTreeSet<u32> = common.flat_map(|common| common.heads()).collect();
        let heads = self.own.heads().len() as u32;
        match heads - held.len() as u32 {
            0 => Ok(()),
            missing => Err(PartFault::HeadsMissing { missing, heads }),
        }
    }
}

/// Reserves memory for the bytes of a part, and for the first part the blocks of the copy.
pub(super) fn reserve(
    pool: &Pool,
    gathering: Option<Arc<Gathering>>,
    bytes: &ManifestBytes,
    CopyPart { part, .. }: CopyPart,
) -> Result<Reserved<PartImport>, (Refusal, u64)> {
    let refused = |reason: Refusal| (reason, work::free_blocks(pool));
    let fault = |fault: PartFault| refused(Refusal::Part { part, fault });
    let gathering = gathering.ok_or_else(|| fault(PartFault::HeadsUnknown))?;
    let (manifest, _) = work::read_manifest(bytes).map_err(refused)?;
    if manifest.sequence().is_none() {
        return Err(fault(PartFault::Cached));
    }
    let joined = gathering.join(pool, &manifest);
    let (missing, accepted) = joined.map_err(|error| refused(work::refusal_of(pool, &manifest, error)))?;
    gathering.check_heads(part).map_err(fault)?;
    let heads = manifest.heads().unwrap_or(gathering.own);
    let staged = match missing.len() as u32 {
        0 => None,
        frames => {
            Some(gathering.stagings.reserve(manifest.form().heads(), frames).map_err(
                |error| match error {
                    StagingError::Full { needed, free } => fault(PartFault::Staging { needed, free }),
                    error => refused(Refusal::Manifest(text(error))),
                },
            )?)
        }
    };
    let places = |places: &[u32]| Places::of(places.iter().copied());
    let lists = places(&missing).and_then(|missing| Ok((missing, places(&accepted)?)));
    let (places, accepted) = lists.map_err(|error| refused(Refusal::Manifest(text(error))))?;
    let missing = missing.into_iter().zip(0..).collect();
    let import = PartImport { gathering, heads, sequence: manifest.sequence(), missing, staged };
    let piece = import.piece();
    let blocks = manifest.blocks();
    Ok(Reserved { import, blocks, missing: places, accepted, piece, damaged: Vec::new() })
}

impl PartImport {
    pub(super) fn sequence_id(&self) -> Option<SequenceId> {
        self.sequence
    }

    fn piece(&self) -> Option<Piece> {
        let staged = self.staged.as_ref()?;
        let mut runs: Vec<Run> = Vec::new();
        for &(_, index) in &self.missing {
            let frame = staged.frame(index);
            match runs.last_mut() {
                Some(last) if last.start.0 + last.len == frame.0 => last.len += 1,
                _ => runs.push(Run { start: frame, len: 1 }),
            }
        }
        (!runs.is_empty()).then(|| Piece { runs, hold: staged.clone(), staged: Some(staged.region()) })
    }

    /// Writes the arrived blocks into the import, and compares their checksums.
    pub(super) fn verify(&mut self) -> Result<Verified, Text> {
        let mut bad = Vec::new();
        for (place, index) in std::mem::take(&mut self.missing) {
            let bytes = self.staged.as_ref().and_then(|staged| staged.take(index));
            let mut state = self.gathering.state();
            let Some(import) = &mut state.import else { return Err(Text::new("the copy has ended")) };
            match bytes.map(|bytes| import.write(place, Some(self.heads), &bytes)) {
                Some(Ok(())) => {}
                None | Some(Err(TransferError::Checksum { .. })) => bad.push((place, index)),
                Some(Err(error)) => return Err(text(error)),
            }
        }
        let places = Places::of(bad.iter().map(|&(place, _)| place)).map_err(text)?;
        self.missing = bad;
        if self.missing.is_empty() {
            // Frees the memory for others.
            self.staged = None;
        }
        Ok(Verified { bad: places, piece: self.piece() })
    }

    pub(super) fn take_place(&self) -> Option<OwnedPermit<Arrival<GroupedSequence>>> {
        self.gathering.state().place.take()
    }

    /// Commits the copy with all of its parts to this pool. On an error it is gone.
    pub(super) fn commit(self, is_current: bool) -> Result<Imported, Text> {
        let import = self.gathering.state().import.take();
        work::commit(import.ok_or_else(|| Text::new("the copy has ended"))?, is_current)
    }
}
