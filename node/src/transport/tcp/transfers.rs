//! Transfers to peers, split into items.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use kvpool::Run;
use kvpool::transport::{PeerId, Submission, Tag, TransferId, TransferState, TransportError};

use super::region::{Held, NAME, Over, Region, Signal, split};
use crate::wire::{ItemHead, ItemStatus, Limits};

/// Bytes of an item below which a transfer is not split further for more streams.
const ITEM_BYTES_MIN: usize = 4 << 20;

#[derive(Default)]
pub(super) struct Transfers {
    next: u64,
    next_item: u64,
    entries: HashMap<TransferId, Entry>,
    queues: HashMap<PeerId, VecDeque<TransferId>>,
}

struct Entry {
    peer: PeerId,
    tag: Tag,
    /// Unsent frames, consumed from the beginning of the first run.
    local: VecDeque<Run>,
    remote: VecDeque<Run>,
    left: usize,
    unacknowledged: usize,
    /// `None` once the transfer has ended.
    source: Option<Arc<Held>>,
    over: Arc<Over>,
    result: Option<Result<(), TransportError>>,
}

pub(super) struct Item {
    pub(super) sent: Sent,
    pub(super) source: Weak<Held>,
    pub(super) region: Arc<Region>,
    pub(super) local: Run,
    pub(super) head: ItemHead,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) item: u64,
    pub(super) transfer: TransferId,
    tag: Tag,
    run: Run,
}

/// Remains of an ended transfer, dropped outside of any lock, since the hold runs user code.
#[must_use]
pub(super) struct Remains(#[expect(dead_code, reason = "only dropped")] Option<Arc<Held>>);

impl Transfers {
    pub(super) fn add(
        &mut self,
        submission: Submission,
        region: Arc<Region>,
        limits: &Limits,
        signal: Arc<Signal>,
    ) -> Result<TransferId, TransportError> {
        let local = region.check(&submission.local)?;
        let remote = submission.remote.iter().map(|run| run.len as usize).sum();
        if local != remote || local == 0 {
            return Err(TransportError::FramesDiffer { local, remote });
        }
        if let Some(run) = submission.remote.iter().find(|run| run.start.0.checked_add(run.len).is_none()) {
            let start = u64::from(run.start.0);
            return Err(TransportError::OutOfRange {
                start,
                end: start + u64::from(run.len),
                of: "the grant",
            });
        }
        let live = self.entries.values().filter(|entry| entry.peer == submission.peer && !entry.is_over());
        let (used, max) = (live.count() as u64, limits.transfers_per_peer as u64);
        if used >= max {
            return Err(TransportError::Quota { what: "transfers to the peer", asked: 1, used, max });
        }
        let id = TransferId(self.next);
        self.next += 1;
        let over = Over::new(signal);
        let full = |runs: Vec<Run>| runs.into_iter().filter(|run| run.len > 0).collect();
        let entry = Entry {
            peer: submission.peer,
            tag: submission.tag,
            local: full(submission.local),
            remote: full(submission.remote),
            left: local,
            unacknowledged: 0,
            source: Some(Arc::new(Held::new(region, submission.hold, over.clone()))),
            over,
            result: None,
        };
        self.entries.insert(id, entry);
        self.queues.entry(submission.peer).or_default().push_back(id);
        Ok(id)
    }

    /// Takes the next item for a peer with `streams` streams: `bytes` bytes, but at least one
    /// frame. Large items have long pieces in each plane, which are transferred faster. They shrink
    /// towards the end of a transfer, so that all streams end at about the same time.
    pub(super) fn next_item(&mut self, peer: PeerId, bytes: usize, streams: usize) -> Option<Item> {
        let queue = self.queues.get_mut(&peer)?;
        loop {
            let &transfer = queue.front()?;
            let entry = self.entries.get_mut(&transfer);
            let Some((entry, source)) = entry.and_then(|entry| {
                let source = entry.source.clone()?;
                (!entry.local.is_empty()).then_some((entry, source))
            }) else {
                queue.pop_front();
                continue;
            };
            let region = source.region.clone();
            let share = (entry.left * region.frame_bytes() / (2 * streams.max(1))).max(ITEM_BYTES_MIN);
            let (local, run) = entry.take(bytes.min(share).min(u32::MAX as usize) / region.frame_bytes());
            entry.unacknowledged += 1;
            let item = self.next_item;
            self.next_item += 1;
            let bytes = (run.len as usize * region.frame_bytes()) as u32;
            let head = ItemHead { item, tag: entry.tag, run, form: region.form(local), bytes };
            let sent = Sent { item, transfer, tag: entry.tag, run };
            return Some(Item { sent, source: Arc::downgrade(&source), region, local, head });
        }
    }

    pub(super) fn acknowledged(&mut self, sent: Sent, status: ItemStatus) -> Remains {
        if status != ItemStatus::Written {
            return self.fail(sent.transfer, refusal(sent, status));
        }
        let Some(entry) = self.entries.get_mut(&sent.transfer) else { return Remains(None) };
        entry.unacknowledged -= 1;
        if entry.unacknowledged == 0 && entry.local.is_empty() && entry.result.is_none() {
            entry.result = Some(Ok(()));
            return Remains(entry.source.take());
        }
        Remains(None)
    }

    pub(super) fn fail(&mut self, transfer: TransferId, error: TransportError) -> Remains {
        let Some(entry) = self.entries.get_mut(&transfer) else { return Remains(None) };
        if entry.result.is_none() {
            entry.result = Some(Err(error));
        }
        Remains(entry.source.take())
    }

    pub(super) fn fail_peer(&mut self, peer: PeerId, error: &TransportError) -> Vec<Remains> {
        self.queues.remove(&peer);
        let of_peer = self.entries.iter().filter(|(_, entry)| entry.peer == peer);
        let transfers: Vec<_> = of_peer.map(|(&transfer, _)| transfer).collect();
        transfers.into_iter().map(|transfer| self.fail(transfer, error.clone())).collect()
    }

    /// Returns the flag whether a transfer is over, for [`state`](Self::state).
    pub(super) fn over(&self, transfer: TransferId) -> Option<Arc<Over>> {
        self.entries.get(&transfer).map(|entry| entry.over.clone())
    }

    /// Returns the state of a transfer, given whether it is over; forgets it once reported.
    pub(super) fn state(&mut self, transfer: TransferId, over: bool) -> TransferState {
        let Some(entry) = self.entries.get(&transfer) else {
            return TransferState::Failed(TransportError::Unknown { what: "transfer", number: transfer.0 });
        };
        match &entry.result {
            Some(Err(error)) if !over => TransferState::Quarantined(error.clone()),
            // Another thread is about to drop the hold.
            Some(Ok(())) if !over => TransferState::InFlight,
            None => TransferState::InFlight,
            Some(result) => {
                let state = result.clone().map_or_else(TransferState::Failed, |()| TransferState::Done);
                self.entries.remove(&transfer);
                state
            }
        }
    }

    pub(super) fn has(&self, peer: PeerId) -> bool {
        self.entries.values().any(|entry| entry.peer == peer && !entry.is_over())
    }

    pub(super) fn live(&self) -> usize {
        self.entries.values().filter(|entry| !entry.is_over()).count()
    }
}

impl Entry {
    fn is_over(&self) -> bool {
        self.over.is_set()
    }

    /// Takes the next frames, consecutive on both sides: up to `frames`, but at least one.
    fn take(&mut self, frames: usize) -> (Run, Run) {
        let frames = u32::try_from(frames.max(1)).unwrap_or(u32::MAX);
        let (local, remote) = (&mut self.local, &mut self.remote);
        let frames = frames.min(local[0].len).min(remote[0].len);
        self.left -= frames as usize;
        let next = |runs: &mut VecDeque<Run>| {
            let taken = split(&mut runs[0], frames);
            if runs[0].len == 0 {
                runs.pop_front();
            }
            taken
        };
        (next(local), next(remote))
    }
}

fn refusal(sent: Sent, status: ItemStatus) -> TransportError {
    let unsupported = |what: &str| TransportError::Unsupported { name: NAME, what: what.into() };
    match status {
        ItemStatus::OutsideGrant => {
            let (start, end) = (sent.run.start.0.into(), sent.run.end().into());
            TransportError::OutOfRange { start, end, of: "the peer's grant" }
        }
        ItemStatus::OtherSize => unsupported("write frames of another size"),
        ItemStatus::Overlap => unsupported("write a frame twice at a time"),
        ItemStatus::Storage => TransportError::Storage("that of the peer".into()),
        ItemStatus::UnknownGrant | ItemStatus::Written => {
            TransportError::Unknown { what: "the peer's tag", number: sent.tag.0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvpool::storage::HostStorage;
    use kvpool::transport::RegionId;
    use kvpool::{FrameId, KvLayout};

    use super::*;

    /// Adds a transfer of frames of 1 MiB, and returns the frames of its items.
    fn items(frames: u32, bytes: usize, streams: usize) -> Vec<u32> {
        let layout = KvLayout::builder().layers(16).kv_heads(8).head_dim(128).block_tokens(16);
        let layout = layout.build().unwrap();
        assert_eq!(layout.packed_bytes(), 1 << 20);
        let storage = Arc::new(HostStorage::new(layout, 256, 256).unwrap());
        let region = Arc::new(Region::new(storage).unwrap());
        let runs = vec![Run { start: FrameId(0), len: frames }];
        let submission = Submission {
            region: RegionId(0),
            peer: PeerId(0),
            remote_region: RegionId(0),
            local: runs.clone(),
            remote: runs,
            tag: Tag(1),
            hold: Arc::new(()),
        };
        let mut transfers = Transfers::default();
        transfers.add(submission, region, &Limits::default(), Arc::default()).unwrap();
        let items = std::iter::from_fn(|| transfers.next_item(PeerId(0), bytes, streams));
        items.map(|item| item.head.run.len).collect()
    }

    #[test]
    fn items_become_smaller_towards_the_end() {
        let frames = items(200, 16 << 20, 4);
        assert_eq!((frames[0], frames.iter().sum::<u32>()), (16, 200));
        assert!(frames.is_sorted_by(|before, after| before >= after), "{frames:?}");
        let (last, rest) = frames.split_last().unwrap();
        assert!(*last <= 4 && rest.iter().all(|&frames| frames >= 4), "{frames:?}");
        assert_eq!(items(16, 16 << 20, 4), [4, 4, 4, 4]);
        assert_eq!(items(16, 16 << 20, 1), [8, 4, 4]);
        // The limit applies, but a frame is never split.
        assert_eq!(items(5, 2 << 20, 4), [2, 2, 1]);
        assert_eq!(items(2, 1000, 4), [1, 1]);
    }
}
