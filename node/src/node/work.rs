//! The work of a migration: exports, transfers, imports and checksums.
//!
//! Each function takes the export or import, and returns it with the result. All run on blocking
//! threads, except for the transfer, which waits for a transport.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use kvpool::Carried;
use kvpool::prefix::BlockHash;
use kvpool::transfer::{Export, Import, Imported, Manifest};
use kvpool::transport::{
    Hold, PeerId, RegionId, Submission, Tag, TransferId, TransferState, Transport, TransportError,
};
use kvpool::{AllocError, FrameId, GroupedSequence, Pool, Run, TransferError};
use tokio::sync::oneshot;

use crate::protocol::{Attempt, FetchBytes, Grant, List, ManifestBytes, Places, Range, Refusal, Text, Work};

/// Bytes per submission: their blocks are pinned until they are sent.
const PIECE_BYTES: usize = 64 << 20;

#[derive(Clone)]
pub(super) struct Carrier {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) region: RegionId,
}

pub(super) fn text(error: impl ToString) -> Text {
    Text::new(error.to_string())
}

pub(super) struct Found {
    pub(super) export: Export<GroupedSequence>,
    pub(super) manifest: ManifestBytes,
    pub(super) blocks: usize,
    pub(super) damaged: usize,
}

/// Returns the approximate number of blocks that a peer asks for, never too few.
pub(super) fn asked_blocks(what: &FetchBytes) -> usize {
    what.len() / size_of::<BlockHash>()
}

/// Exports the leading blocks here of those that a peer asked for, at most `blocks_max`. It stops
/// at a block whose bytes differ from those that once arrived here, and drops it from the cache, so
/// that the next arrival replaces it. The checksum of the arrival is trusted, never a peer's claim.
pub(super) fn export_prefix(
    pool: &Pool,
    what: &FetchBytes,
    blocks_max: usize,
    message_max: usize,
) -> Result<Found, Text> {
    let (_, mut hashes): (u32, Vec<BlockHash>) = postcard::from_bytes(what).map_err(text)?;
    hashes.truncate(blocks_max);
    let mut damaged = Vec::new();
    loop {
        let export = pool.export_prefix(&hashes).map_err(text)?;
        let manifest = export.manifest().map_err(text)?;
        let bad = export.damaged(&manifest);
        let Some(place) = hashes.iter().position(|hash| bad.first() == Some(hash)) else {
            let (manifest, blocks) = describe_as(&manifest, &damaged, message_max)?;
            return Ok(Found { export: export.into_grouped(), manifest, blocks, damaged: damaged.len() });
        };
        hashes.truncate(place);
        drop(export);
        let (blocks, uncached) = (bad.len(), pool.uncache(&bad));
        damaged.extend(bad);
        tracing::warn!(
            blocks,
            evicted = uncached.evicted_blocks,
            "cached blocks are not what arrived: the memory was damaged"
        );
    }
}

pub(super) fn fetch_bytes(hashes: &[BlockHash]) -> Result<FetchBytes, Text> {
    // The number is of no use: it was the place of the first block in its chain.
    FetchBytes::new(postcard::to_allocvec(&(0_u32, hashes)).map_err(text)?).map_err(text)
}

/// Bytes of a message besides its one value that may be long.
const AROUND: usize = 256;

/// Checks that a value fits into a message to the peer.
pub(super) fn fits(bytes: usize, message_max: usize) -> Result<(), Text> {
    if bytes.saturating_add(AROUND) > message_max {
        let what = format!("a message of {bytes} bytes is needed, and the peer takes {message_max}");
        return Err(Text::new(what));
    }
    Ok(())
}

/// Returns the maximum encoded size of places and the runs of a grant.
pub(super) fn places_bytes(places: &[&Places], runs: usize) -> usize {
    // Two numbers of up to five bytes each.
    (places.iter().map(|places| places.ranges().len()).sum::<usize>() + runs) * 10
}

/// Encodes the manifest of an export, for a peer with this limit of messages.
pub(super) fn describe(
    export: &Export<GroupedSequence>,
    message_max: usize,
) -> Result<(ManifestBytes, usize), Text> {
    describe_as(&export.manifest().map_err(text)?, &[], message_max)
}

/// Encodes a manifest, and behind it the blocks that were dropped because they were damaged. A
/// former release writes and reads the manifest alone.
fn describe_as(
    manifest: &Manifest,
    damaged: &[BlockHash],
    message_max: usize,
) -> Result<(ManifestBytes, usize), Text> {
    let mut bytes = postcard::to_allocvec(manifest).map_err(text)?;
    if !damaged.is_empty() {
        bytes = postcard::to_extend(damaged, bytes).map_err(text)?;
    }
    fits(bytes.len(), message_max)?;
    Ok((ManifestBytes::new(bytes).map_err(text)?, manifest.blocks()))
}

pub(super) struct Piece {
    pub(super) runs: Vec<Run>,
    pub(super) hold: Hold,
    /// The TCP region of these frames, if they are not the pool's.
    pub(super) staged: Option<RegionId>,
}

/// Blocks reserved for a manifest, and what a transport may write of them.
pub(super) struct Reserved<I> {
    pub(super) import: I,
    pub(super) blocks: usize,
    pub(super) missing: Places,
    pub(super) accepted: Places,
    pub(super) piece: Option<Piece>,
    /// Blocks that the source dropped because they were damaged.
    pub(super) damaged: Vec<BlockHash>,
}

impl<I> Reserved<I> {
    pub(super) fn map<J>(self, map: impl FnOnce(I) -> J) -> Reserved<J> {
        let Self { import, blocks, missing, accepted, piece, damaged } = self;
        Reserved { import: map(import), blocks, missing, accepted, piece, damaged }
    }
}

/// Returns the number of blocks that are free or can be reclaimed.
pub(super) fn free_blocks(pool: &Pool) -> u64 {
    let stats = pool.stats();
    (stats.free + stats.evictable) as u64
}

pub(super) fn refusal_of(pool: &Pool, manifest: &Manifest, error: TransferError) -> Refusal {
    match error {
        TransferError::Sequence(_) if manifest.sequence().is_some_and(|id| pool.view(id).is_some()) => {
            Refusal::Exists
        }
        TransferError::Alloc(AllocError::DeviceLost { .. }) => Refusal::Closed(text(error)),
        TransferError::Alloc(AllocError::OverQuota { .. }) => Refusal::Manifest(text(error)),
        TransferError::Alloc(_) => Refusal::Full { needed: manifest.blocks() as u64 },
        error => Refusal::Manifest(text(error)),
    }
}

/// Reads a manifest, and what is behind it. The error says if it is of another version.
pub(super) fn read_manifest(bytes: &[u8]) -> Result<(Manifest, &[u8]), Refusal> {
    let unread = |error: postcard::Error| Refusal::Manifest(text(error));
    let (version, _) = postcard::take_from_bytes::<u32>(bytes).map_err(unread)?;
    Manifest::check_version(version).map_err(|error| Refusal::Manifest(text(error)))?;
    postcard::take_from_bytes(bytes).map_err(unread)
}

/// Why a pool of several groups takes no sequence from a node.
const GROUPED: &str = "its engine takes sequences of one list of blocks, and the pool has several";

/// Reserves the blocks of a manifest, which is untrusted input.
pub(super) fn reserve(
    pool: &Pool,
    bytes: &ManifestBytes,
    brings_sequence: bool,
    takes_grouped: bool,
) -> Result<Reserved<Import>, (Refusal, u64)> {
    let refused = |reason: Refusal| (reason, free_blocks(pool));
    let unread = |error: postcard::Error| refused(Refusal::Manifest(text(error)));
    let (manifest, behind) = read_manifest(bytes).map_err(refused)?;
    let damaged =
        if behind.is_empty() { Vec::new() } else { postcard::from_bytes(behind).map_err(unread)? };
    let blocks = manifest.blocks();
    if manifest.sequence().is_some() != brings_sequence {
        let what = "it is not of what the migration brings";
        return Err(refused(Refusal::Manifest(Text::new(what))));
    }
    if brings_sequence && !takes_grouped && pool.cache_groups().len() > 1 {
        return Err(refused(Refusal::Manifest(Text::new(GROUPED))));
    }
    let import = pool.import(&manifest);
    let mut import = import.map_err(|error| refused(refusal_of(pool, &manifest, error)))?;
    let places = |places: &[u32]| Places::of(places.iter().copied());
    let lists = places(import.missing()).and_then(|missing| Ok((missing, places(&import.accepted())?)));
    let (missing, accepted) = lists.map_err(|error| refused(Refusal::Manifest(text(error))))?;
    let piece = piece_of(&mut import, &missing).map_err(|error| refused(Refusal::Manifest(error)))?;
    Ok(Reserved { import, blocks, missing, accepted, piece, damaged })
}

fn piece_of(import: &mut Import, places: &Places) -> Result<Option<Piece>, Text> {
    if places.is_empty() {
        return Ok(None);
    }
    let places: Vec<u32> = places.iter().collect();
    let piece = import.piece(&places).map_err(text)?;
    Ok(Some(Piece { runs: piece.runs, hold: piece.hold, staged: None }))
}

pub(super) struct Verified {
    pub(super) bad: Places,
    pub(super) piece: Option<Piece>,
}

pub(super) fn verify(import: &mut Import) -> Result<Verified, Text> {
    let bad = Places::of(import.verify().map_err(text)?).map_err(text)?;
    let piece = piece_of(import, &bad)?;
    Ok(Verified { bad, piece })
}

/// Commits an import to the pool. On an error the import is gone. Unless the source's copy
/// `is_current`, its blocks cannot be found by their hashes.
pub(super) fn commit(mut import: Import, is_current: bool) -> Result<Imported, Text> {
    if !is_current {
        import.forget();
    }
    import.commit().map_err(|error| text(error.error))
}

pub(super) fn grant_of(way: u8, tag: Tag, region: RegionId, runs: &[Run]) -> Result<Grant, Text> {
    let ranges = runs.iter().map(|run| Range { start: run.start.0, len: run.len }).collect();
    Ok(Grant { way, tag: tag.0, region: region.0, runs: List::new(ranges).map_err(text)? })
}

pub(super) struct Lost {
    pub(super) error: TransportError,
    /// Set if it is not known to be over.
    pub(super) quarantined: Option<TransferId>,
}

impl From<TransportError> for Lost {
    fn from(error: TransportError) -> Self {
        Self { error, quarantined: None }
    }
}

/// Writes the bytes of some places into the frames of a grant.
pub(super) async fn transfer(
    carrier: &Carrier,
    peer: PeerId,
    export: &Export<GroupedSequence>,
    places: &Places,
    grant: &Grant,
    stop: &mut oneshot::Receiver<()>,
) -> Result<Carried, Lost> {
    let began = Instant::now();
    let block_bytes = export.storage().layout().packed_bytes();
    let places: Vec<u32> = places.iter().collect();
    let mut remote = Frames::new(grant);
    let mut carried = Carried::default();
    for places in places.chunks((PIECE_BYTES / block_bytes.max(1)).max(1)) {
        let piece = export.piece(places).map_err(|error| TransportError::Storage(error.to_string()))?;
        let runs = remote.take(places.len() as u32);
        carried.runs += piece.runs.len().max(runs.len());
        let submission = Submission {
            region: carrier.region,
            peer,
            remote_region: RegionId(grant.region),
            local: piece.runs,
            remote: runs,
            tag: Tag(grant.tag),
            hold: piece.hold,
        };
        // SAFETY: the piece's hold keeps the bytes of the frames: see `Export::piece`.
        let transfer = unsafe { carrier.transport.submit(submission) }?;
        finished(&*carrier.transport, transfer, stop).await?;
        carried.blocks += places.len();
        carried.bytes += (places.len() * block_bytes) as u64;
    }
    carried.took = began.elapsed();
    Ok(carried)
}

/// Waits for the end of a transfer; cancels it on the stop signal.
async fn finished(
    transport: &dyn Transport,
    transfer: TransferId,
    stop: &mut oneshot::Receiver<()>,
) -> Result<(), Lost> {
    let over = poll_fn(|cx| match transport.poll(transfer, Some(cx.waker())) {
        TransferState::InFlight => Poll::Pending,
        state => Poll::Ready(state),
    });
    let state = tokio::select! {
        biased;
        state = over => state,
        _ = stop => transport.cancel(transfer),
    };
    match state {
        TransferState::Done => Ok(()),
        TransferState::Failed(error) => Err(error.into()),
        TransferState::Quarantined(error) => Err(Lost { error, quarantined: Some(transfer) }),
        state => Err(TransportError::Storage(format!("an unknown state: {state:?}")).into()),
    }
}

pub(super) async fn over(transport: Arc<dyn Transport>, transfer: TransferId) {
    poll_fn(|cx| match transport.poll(transfer, Some(cx.waker())) {
        TransferState::Done | TransferState::Failed(_) => Poll::Ready(()),
        _ => Poll::Pending,
    })
    .await;
}

/// The frames of a grant, consumed piece by piece.
struct Frames<'a> {
    ranges: &'a [Range],
    /// Frames of the first range that were taken.
    taken: u32,
}

impl<'a> Frames<'a> {
    fn new(grant: &'a Grant) -> Self {
        Self { ranges: &grant.runs, taken: 0 }
    }

    /// Returns the next frames as runs; fewer at the end of the grant, which is then refused.
    fn take(&mut self, mut frames: u32) -> Vec<Run> {
        let mut runs = Vec::new();
        while let (true, Some(range)) = (frames > 0, self.ranges.first()) {
            let len = frames.min(range.len - self.taken);
            if len > 0 {
                runs.push(Run { start: FrameId(range.start.saturating_add(self.taken)), len });
            }
            frames -= len;
            self.taken += len;
            if self.taken == range.len {
                (self.ranges, self.taken) = (&self.ranges[1..], 0);
            }
        }
        runs
    }
}

pub(super) fn refused((reason, free): (Refusal, u64)) -> Work {
    Work::ReserveRefused { reason, free }
}

pub(super) fn transferred(attempt: Attempt, result: &Result<Carried, Lost>) -> Work {
    match result {
        Ok(_) => Work::Transferred(attempt),
        Err(lost) => Work::TransferFailed(attempt, text(&lost.error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pool could import the sequence, but no arrival could hand it over.
    #[test]
    fn a_sequence_of_several_groups_is_refused_before_anything_is_taken() {
        use kvpool::{AdmitRequest, Dtype, KvLayout, SequenceId, Tokens, Window};

        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
        let layout = layout.block_tokens(4).build().unwrap();
        let pool = |states: Option<usize>| {
            let groups =
                [None, Some(Window::new(9).unwrap())].into_iter().skip(usize::from(states.is_some()));
            let builder = Pool::builder(layout.clone()).blocks(50).groups(groups);
            builder.states(states).build().unwrap()
        };
        for states in [None, Some(2)] {
            let [from, to] = [pool(states), pool(states)];
            let prompt = AdmitRequest::new(SequenceId(7), &[1; 9]);
            let mut sequence = from.admit_grouped(&prompt).unwrap();
            let mut batch = from.begin_batch();
            batch.append_grouped(&mut sequence, Tokens::Final(9)).unwrap();
            batch.finish();
            let export = from.export_copy(&sequence).unwrap();
            let manifest = export.manifest().unwrap();
            drop(to.import(&manifest).unwrap());
            let bytes = ManifestBytes::new(postcard::to_allocvec(&manifest).unwrap()).unwrap();
            let (refusal, free) = reserve(&to, &bytes, true, false).map(|_| ()).unwrap_err();
            assert_eq!((refusal, free), (Refusal::Manifest(Text::new(GROUPED)), free_blocks(&to)));
            assert_eq!(to.sequence_count(), 0);
        }
    }

    #[test]
    fn frames_of_a_grant_are_taken_in_order_and_at_most_once() {
        let ranges =
            vec![Range { start: 10, len: 3 }, Range { start: 20, len: 1 }, Range { start: 7, len: 2 }];
        let grant = Grant { way: 0, tag: 1, region: 0, runs: List::new(ranges).unwrap() };
        let run = |start, len| Run { start: FrameId(start), len };
        let mut frames = Frames::new(&grant);
        assert_eq!(frames.take(2), [run(10, 2)]);
        assert_eq!(frames.take(3), [run(12, 1), run(20, 1), run(7, 1)]);
        assert_eq!(frames.take(5), [run(8, 1)]);
        assert_eq!(frames.take(1), []);
    }
}
