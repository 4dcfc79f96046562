//! The transport within a process: copies from storage to storage, in the submitting thread.
//!
//! ```text
//! submit   source: region and peer found; one more copy             state of the source's end
//!          target: grant found, checked; one more writer            state of the target's end
//!          the copy, without a lock
//!          target: one writer less; the last one of a revoked grant drops its hold
//!          source: transfer is done, or failed
//! revoke   no writer: the hold is dropped;  else quarantined until the last writer has left
//! ```
//!
//! A copy whose end is not known ([`StorageError::LostWhileCopying`]) has failed, and stays: its writer
//! and the holds of both ends are kept for good.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;
use std::time::Instant;

use crate::error::StorageError;
use crate::ids::Run;
use crate::storage::Storage;
use crate::sync::caught;

use super::transport::{
    Grant, Operation, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};

/// Begins the metadata of an end.
const MAGIC: &[u8; 8] = b"kvpool-p";

/// Transport between pools of one process.
///
/// [`submit`](Transport::submit) copies the bytes and blocks meanwhile; a transfer is over when it
/// returns. [`add_peer`](Transport::add_peer) accepts the metadata of other ends of this process.
pub struct Process(Arc<End>);

/// One end: an entry of [`ENDS`].
struct End {
    number: u64,
    state: Mutex<State>,
    /// Told when a copy ends.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    regions: Vec<Arc<dyn Storage>>,
    peers: Vec<Option<Weak<End>>>,
    grants: BTreeMap<Tag, Granted>,
    /// Results of transfers that were not polled. Numbers are known only afterwards.
    transfers: BTreeMap<u64, Result<(), TransportError>>,
    /// Number of the last transfer.
    last: u64,
    /// Own transfers in flight, and copies into own frames.
    copies: usize,
    is_closed: bool,
}

impl State {
    /// Returns the number of a peer; a new one is added in the place of one that is gone and has no
    /// grant.
    fn peer_of(&mut self, peer: Weak<End>) -> PeerId {
        let Self { peers, grants, .. } = self;
        let is_known = |known: &Option<Weak<End>>| known.as_ref().is_some_and(|known| known.ptr_eq(&peer));
        if let Some(place) = peers.iter().position(is_known) {
            return PeerId(place as u32);
        }
        let is_granted = |place| grants.values().any(|granted| granted.grant.peer == PeerId(place));
        let is_gone =
            |known: &Option<Weak<End>>| known.as_ref().is_none_or(|known| known.strong_count() == 0);
        let place = (0..).zip(&*peers).find(|&(place, known)| is_gone(known) && !is_granted(place));
        match place.map(|(place, _)| place) {
            Some(place) => {
                peers[place as usize] = Some(peer);
                PeerId(place)
            }
            None => {
                peers.push(Some(peer));
                PeerId(peers.len() as u32 - 1)
            }
        }
    }
}

struct Granted {
    grant: Grant,
    writers: usize,
    is_revoked: bool,
}

/// The ends of this process that exist.
static ENDS: Mutex<(u64, BTreeMap<u64, Weak<End>>)> = Mutex::new((0, BTreeMap::new()));

/// Returns a number that other processes do not have.
fn process_number() -> [u8; 16] {
    static NUMBER: OnceLock<[u8; 16]> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut number = [0; 16];
        // Without randomness, the process id tells the processes of this system apart.
        if getrandom::fill(&mut number).is_err() {
            number[..4].copy_from_slice(&std::process::id().to_le_bytes());
        }
        number
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// Creates an end without peers.
    pub fn new() -> Self {
        let mut ends = lock(&ENDS);
        ends.0 += 1;
        let end =
            Arc::new(End { number: ends.0, state: Mutex::new(State::default()), ended: Condvar::new() });
        ends.1.insert(end.number, Arc::downgrade(&end));
        Self(end)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    /// Adds another end of this process as a peer. Adding it again returns the same number.
    pub(super) fn connect(&self, other: &Self) -> PeerId {
        self.state().peer_of(Arc::downgrade(&other.0))
    }

    /// Copies the frames of a submission.
    ///
    /// # Safety
    ///
    /// As for [`Transport::submit`].
    unsafe fn copy(
        &self,
        source: &dyn Storage,
        target: &Arc<End>,
        submission: &Submission,
    ) -> Result<(), TransportError> {
        let (tag, remote) = (submission.tag, &submission.remote);
        let writing = Writing::begin(target, tag, &self.0, remote)?;
        // SAFETY: the caller keeps the bytes of the local frames; the grant's caller promised that no
        // other thread accesses the remote ones; and both holds live until the copy has ended.
        let copied = caught(|| unsafe { writing.storage.receive(source, &submission.local, remote) });
        let copied = copied.ok_or(TransportError::Panicked)?;
        if matches!(copied, Err(StorageError::LostWhileCopying { .. })) {
            // The grant keeps its writer, and with it the frames and the storage: for good.
            std::mem::forget(writing);
        }
        copied.map_err(TransportError::LocalStorage)
    }
}

impl Default for Process {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        lock(&ENDS).1.remove(&self.0.number);
    }
}

impl End {
    /// Tells a drain, if there is one, that a copy has ended.
    fn tell(&self, state: &State) {
        // A call into the system each time would cost more than a small copy.
        if state.is_closed {
            self.ended.notify_all();
        }
    }
}

/// A copy into the frames of a grant; ends when it is dropped.
struct Writing<'a> {
    end: &'a End,
    tag: Tag,
    storage: Arc<dyn Storage>,
}

impl<'a> Writing<'a> {
    fn begin(end: &'a End, tag: Tag, source: &Arc<End>, runs: &[Run]) -> Result<Self, TransportError> {
        let mut state = lock(&end.state);
        if state.is_closed {
            return Err(TransportError::Closed);
        }
        let unknown = TransportError::Unknown { what: "grant", number: tag.0 };
        let State { grants, peers, regions, copies, .. } = &mut *state;
        let Some(granted) = grants.get_mut(&tag).filter(|granted| !granted.is_revoked) else {
            return Err(unknown);
        };
        let peer = peers.get(granted.grant.peer.0 as usize).and_then(Option::as_ref);
        // Another peer learns nothing about the grant.
        if peer.is_none_or(|peer| !std::ptr::eq(peer.as_ptr(), Arc::as_ptr(source))) {
            return Err(unknown);
        }
        check_within(runs, &granted.grant.runs, "the grant")?;
        let storage = regions[granted.grant.region.0 as usize].clone();
        granted.writers += 1;
        *copies += 1;
        Ok(Self { end, tag, storage })
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.end.state);
        state.copies -= 1;
        let mut over = None;
        if let Some(granted) = state.grants.get_mut(&self.tag) {
            granted.writers -= 1;
            if granted.is_revoked && granted.writers == 0 {
                over = state.grants.remove(&self.tag);
            }
        }
        self.end.tell(&state);
        drop(state);
        // Without the lock: the hold may release blocks.
        drop(over);
    }
}

fn frames(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

/// Returns the end of a run, which may come from a peer.
fn end_of(run: Run) -> u64 {
    u64::from(run.start.0) + u64::from(run.len)
}

fn check_frames(runs: &[Run], frames: usize) -> Result<(), TransportError> {
    match runs.iter().find(|run| end_of(**run) > frames as u64) {
        Some(&run) => Err(out_of_range(run, "the storage")),
        None => Ok(()),
    }
}

/// Checks that each frame of the runs is among those of `of`.
fn check_within(runs: &[Run], of: &[Run], name: &'static str) -> Result<(), TransportError> {
    if runs == of {
        return Ok(());
    }
    let mut sorted: Vec<Run> = of.to_vec();
    sorted.sort_unstable_by_key(|run| run.start);
    for &run in runs {
        let mut next = u64::from(run.start.0);
        while next < end_of(run) {
            let after = sorted.partition_point(|own| u64::from(own.start.0) <= next);
            let own = after.checked_sub(1).map(|place| sorted[place]);
            match own.filter(|own| end_of(*own) > next) {
                Some(own) => next = end_of(own),
                None => return Err(out_of_range(run, name)),
            }
        }
    }
    Ok(())
}

fn out_of_range(run: Run, of: &'static str) -> TransportError {
    TransportError::OutOfRange { start: u64::from(run.start.0), end: end_of(run), of }
}

impl Transport for Process {
    fn name(&self) -> &'static str {
        "process"
    }

    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError> {
        let mut state = self.state();
        state.regions.push(storage.clone());
        Ok(RegionId(state.regions.len() as u32 - 1))
    }

    fn metadata(&self) -> Vec<u8> {
        [&MAGIC[..], &process_number(), &self.0.number.to_le_bytes()].concat()
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError> {
        let invalid = |reason: &str| TransportError::Metadata(reason.into());
        let rest = metadata.strip_prefix(MAGIC).ok_or_else(|| invalid("not those of this transport"))?;
        let number = rest.strip_prefix(&process_number()).ok_or_else(|| invalid("of another process"))?;
        let number = number.try_into().map_err(|_| invalid("a wrong length"))?;
        let number = u64::from_le_bytes(number);
        let gone =
            || TransportError::PeerGone { peer: format!("end {number}"), reason: "it was dropped".into() };
        let peer = lock(&ENDS).1.get(&number).cloned().ok_or_else(gone)?;
        Ok(self.state().peer_of(peer))
    }

    fn remove_peer(&self, peer: PeerId) {
        if let Some(peer) = self.state().peers.get_mut(peer.0 as usize) {
            *peer = None;
        }
    }

    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        let mut state = self.state();
        if state.is_closed {
            return Err(TransportError::Closed);
        }
        let unknown = |what, number: u32| TransportError::Unknown { what, number: number.into() };
        let region = state.regions.get(grant.region.0 as usize);
        let storage = region.ok_or_else(|| unknown("region", grant.region.0))?;
        check_frames(&grant.runs, storage.frames())?;
        if state.peers.get(grant.peer.0 as usize).is_none_or(Option::is_none) {
            return Err(unknown("peer", grant.peer.0));
        }
        if state.grants.contains_key(&grant.tag) {
            let what = "grant a tag that is in use".into();
            return Err(TransportError::Unsupported { name: self.name(), what });
        }
        state.grants.insert(grant.tag, Granted { grant, writers: 0, is_revoked: false });
        Ok(())
    }

    fn revoke(&self, tag: Tag, _source: SourceState) -> TransferState {
        let mut state = self.state();
        let unknown = TransportError::Unknown { what: "grant", number: tag.0 };
        let Some(granted) = state.grants.get_mut(&tag) else { return TransferState::Failed(unknown) };
        granted.is_revoked = true;
        if granted.writers > 0 {
            let peer = format!("peer {}", granted.grant.peer.0);
            return TransferState::Quarantined(TransportError::Stalled { peer, waited_ms: 0 });
        }
        let over = state.grants.remove(&tag);
        drop(state);
        drop(over);
        TransferState::Done
    }

    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError> {
        let (local, remote) = (frames(&submission.local), frames(&submission.remote));
        if local != remote || local == 0 {
            return Err(TransportError::FramesDiffer { local, remote });
        }
        if submission.operation != Operation::Write {
            let what = "read frames of a peer".into();
            return Err(TransportError::Unsupported { name: self.name(), what });
        }
        let unknown = |what, number: u32| TransportError::Unknown { what, number: number.into() };
        let (source, target, number) = {
            let mut state = self.state();
            if state.is_closed {
                return Err(TransportError::Closed);
            }
            let region = state.regions.get(submission.region.0 as usize).cloned();
            let source = region.ok_or_else(|| unknown("region", submission.region.0))?;
            check_frames(&submission.local, source.frames())?;
            let peer = state.peers.get(submission.peer.0 as usize).and_then(Option::as_ref);
            let peer = peer.ok_or_else(|| unknown("peer", submission.peer.0))?;
            let gone = || TransportError::PeerGone {
                peer: format!("peer {}", submission.peer.0),
                reason: "it was dropped".into(),
            };
            let target = peer.upgrade().ok_or_else(gone)?;
            state.last += 1;
            state.copies += 1;
            (source, target, state.last)
        };
        // SAFETY: the caller's promise.
        let copied = unsafe { self.copy(&*source, &target, &submission) };
        if matches!(copied, Err(TransportError::LocalStorage(StorageError::LostWhileCopying { .. }))) {
            // The local frames are never given back, and the copy stays among those in flight.
            std::mem::forget((submission, source));
            self.state().transfers.insert(number, copied);
            return Ok(TransferId(number));
        }
        // Before the transfer is reported as over.
        drop(submission);
        let mut state = self.state();
        state.copies -= 1;
        self.0.tell(&state);
        // A refusal of the target moved no byte.
        if let Err(error) = &copied
            && !matches!(error, TransportError::LocalStorage(_) | TransportError::Panicked)
        {
            return copied.map(|()| TransferId(number));
        }
        state.transfers.insert(number, copied);
        Ok(TransferId(number))
    }

    fn poll(&self, transfer: TransferId, _waker: Option<&Waker>) -> TransferState {
        match self.state().transfers.remove(&transfer.0) {
            Some(Ok(())) => TransferState::Done,
            Some(Err(error)) => TransferState::Failed(error),
            None => TransferState::Failed(TransportError::Unknown { what: "transfer", number: transfer.0 }),
        }
    }

    fn cancel(&self, transfer: TransferId) -> TransferState {
        self.poll(transfer, None)
    }

    fn drain(&self, deadline: Instant) -> usize {
        let mut state = self.state();
        state.is_closed = true;
        // No writer can come any more.
        let (busy, idle): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut state.grants).into_iter().partition(|(_, granted)| granted.writers > 0);
        state.grants = busy;
        state.grants.values_mut().for_each(|granted| granted.is_revoked = true);
        drop(state);
        // Without the lock: the holds may release blocks.
        drop::<BTreeMap<Tag, Granted>>(idle);
        let mut state = self.state();
        while state.copies > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                break;
            };
            let waited = self.0.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.copies
    }
}
