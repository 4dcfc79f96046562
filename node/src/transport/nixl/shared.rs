use std::collections::{HashMap, VecDeque};
use std::task::Waker;

use kvpool::transport::{Hold, PeerId, RegionId, Submission, Tag, TransferId, TransportError};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::span::{Memory, Pair, Region, requests};

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) ended: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) agent_metadata: Vec<u8>,
    pub(super) regions: Vec<Region>,
    pub(super) peers: Vec<Known>,
    pub(super) transfers: HashMap<TransferId, Transfer>,
    /// With the holds of their frames.
    pub(super) grants: HashMap<Tag, Hold>,
    next_transfer: u64,
    pub(super) is_closed: bool,
    pub(super) is_gone: bool,
}

pub(super) struct Known {
    pub(super) metadata: Vec<u8>,
    /// `None` once it was removed.
    pub(super) regions: Option<Vec<Region>>,
}

pub(super) enum Phase {
    InFlight,
    Quarantined(TransportError),
    /// `None` if all bytes arrived.
    Over(Option<TransportError>),
}

pub(super) struct Transfer {
    pub(super) phase: Phase,
    pub(super) waker: Option<Waker>,
}

pub(super) struct Job {
    pub(super) id: TransferId,
    pub(super) peer: PeerId,
    /// Local and remote memory.
    pub(super) memory: (Memory, Memory),
    pub(super) requests: VecDeque<Vec<Pair>>,
    /// Released with the job: only when no request is in flight, or the agent is gone.
    pub(super) _hold: Hold,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No panic happens under the lock.
        self.state.lock()
    }

    pub(super) fn has_grants(&self) -> bool {
        !self.lock().grants.is_empty()
    }

    fn set(&self, id: TransferId, phase: Phase) {
        let waker = {
            let mut state = self.lock();
            let Some(transfer) = state.transfers.get_mut(&id) else { return };
            transfer.phase = phase;
            transfer.waker.take()
        };
        self.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn ended(&self, id: TransferId, error: Option<TransportError>) {
        self.set(id, Phase::Over(error));
    }

    pub(super) fn quarantined(&self, id: TransferId, reason: TransportError) {
        self.set(id, Phase::Quarantined(reason));
    }

    pub(super) fn agent_is_gone(&self) {
        let grants = {
            let mut state = self.lock();
            (state.is_closed, state.is_gone) = (true, true);
            std::mem::take(&mut state.grants)
        };
        drop(grants);
        self.ended.notify_all();
    }
}

impl State {
    pub(super) fn region(&self, region: RegionId) -> Result<&Region, TransportError> {
        let unknown = TransportError::Unknown { what: "region", number: u64::from(region.0) };
        self.regions.get(region.0 as usize).ok_or(unknown)
    }

    pub(super) fn peer_regions(&self, peer: PeerId) -> Result<&[Region], TransportError> {
        let unknown = TransportError::Unknown { what: "peer", number: u64::from(peer.0) };
        self.peers.get(peer.0 as usize).and_then(|known| known.regions.as_deref()).ok_or(unknown)
    }

    pub(super) fn open(&self) -> Result<(), TransportError> {
        if self.is_closed { Err(TransportError::Closed) } else { Ok(()) }
    }

    pub(super) fn job(&mut self, submission: Submission) -> Result<Job, TransportError> {
        self.open()?;
        let Submission { region, peer, remote_region, local, remote, hold, .. } = submission;
        let here = self.region(region)?;
        let number = u64::from(remote_region.0);
        let there = (self.peer_regions(peer)?.get(remote_region.0 as usize))
            .ok_or(TransportError::Unknown { what: "region of the peer", number })?;
        here.check_peer(there)?;
        let (from, to) =
            (here.check_runs(&local, "the storage")?, there.check_runs(&remote, "the peer's storage")?);
        if from != to || from == 0 {
            return Err(TransportError::FramesDiffer { local: from, remote: to });
        }
        let (memory, requests) = ((here.memory, there.memory), requests(here, there, &local, &remote));
        let id = TransferId(self.next_transfer);
        self.next_transfer += 1;
        self.transfers.insert(id, Transfer { phase: Phase::InFlight, waker: None });
        Ok(Job { id, peer, memory, requests: requests.into(), _hold: hold })
    }
}
