use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvpool::Run;
use kvpool::storage::Storage;
use kvpool::transport::{
    Grant, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use parking_lot::Mutex;

use super::api::Api;
use super::metadata::Metadata;
use super::shared::{Known, Phase, Shared, State, Transfer};
use super::span::Region;
use super::work::{self, Answer, Command};

/// Capacity of the command queue. Further submissions wait.
const COMMANDS: usize = 256;

/// Settings of NIXL.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NixlSettings {
    /// The library `libnixl_capi.so`, or the folder of Python packages with `nixl-cu12`. `None` to
    /// search; see [`LOCATION`](super::LOCATION).
    pub location: Option<PathBuf>,
    /// Time without progress after which a transfer is quarantined. 10 s.
    pub patience: Duration,
}

impl Default for NixlSettings {
    fn default() -> Self {
        Self { location: None, patience: Duration::from_secs(10) }
    }
}

/// Transfers by NIXL; see the [module](super).
pub struct NixlTransport {
    shared: Arc<Shared>,
    commands: SyncSender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    version: Option<String>,
}

impl NixlTransport {
    /// Loads NIXL, and starts its thread.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`], with the places that were searched, or NIXL's error.
    pub fn new(settings: &NixlSettings) -> Result<Self, TransportError> {
        let api = Api::load(settings.location.as_deref())?;
        let version = api.version.clone();
        let shared = Arc::new(Shared::default());
        let (commands, queue) = sync_channel(COMMANDS);
        let (started, is_started) = sync_channel(1);
        let (for_thread, patience) = (Arc::clone(&shared), settings.patience);
        let name = format!("kvpool-{:016x}", fastrand::u64(..));
        let thread = std::thread::Builder::new().name("kvpool-nixl".into()).spawn(move || {
            work::run(api, &name, for_thread, patience, &queue, &started);
        });
        let thread = thread.map_err(|error| super::api::unavailable(error.to_string()))?;
        shared.lock().agent_metadata = is_started.recv().unwrap_or(Err(TransportError::Closed))?;
        Ok(Self { shared, commands, thread: Mutex::new(Some(thread)), version })
    }

    /// Returns the released version of the library, if its folder has it.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, TransportError> {
        let (answer, answered) = sync_channel(1);
        self.commands.send(command(answer)).map_err(|_| TransportError::Closed)?;
        answered.recv().unwrap_or(Err(TransportError::Closed))
    }

    fn stop(&self) {
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = self.commands.send(Command::Stop);
            let _ = thread.join();
        }
    }
}

impl Transport for NixlTransport {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError> {
        self.shared.lock().open()?;
        let (region, owner) = Region::of(&**storage)?;
        let described = region.clone();
        let metadata = self.ask(|answer| Command::Register { region, owner, answer })?;
        let mut state = self.shared.lock();
        state.agent_metadata = metadata;
        state.regions.push(described);
        Ok(RegionId(state.regions.len() as u32 - 1))
    }

    fn metadata(&self) -> Vec<u8> {
        let state = self.shared.lock();
        let agent = state.agent_metadata.clone();
        Metadata::new(self.version.clone(), agent, state.regions.clone()).to_bytes()
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError> {
        let Metadata { agent, regions, .. } = Metadata::of_peer(metadata, self.version())?;
        let peer = {
            let mut state = self.shared.lock();
            state.open()?;
            let is_same = |known: &Known| known.metadata == metadata && known.regions.is_some();
            if let Some(place) = state.peers.iter().position(is_same) {
                return Ok(PeerId(place as u32));
            }
            state.peers.push(Known { metadata: metadata.to_vec(), regions: None });
            PeerId(state.peers.len() as u32 - 1)
        };
        self.ask(|answer| Command::AddPeer { peer, agent, answer })?;
        self.shared.lock().peers[peer.0 as usize].regions = Some(regions);
        Ok(peer)
    }

    fn remove_peer(&self, peer: PeerId) {
        let known = {
            let mut state = self.shared.lock();
            let known = state.peers.get_mut(peer.0 as usize);
            known.is_some_and(|known| known.regions.take().is_some())
        };
        if known {
            let _ = self.commands.send(Command::RemovePeer { peer });
        }
    }

    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        let Grant { tag, region, runs, peer, hold } = grant;
        {
            let mut state = self.shared.lock();
            state.open()?;
            state.peer_regions(peer)?;
            check_grant(state.region(region)?, &runs)?;
            if state.grants.contains_key(&tag) {
                return Err(TransportError::Unknown { what: "unused tag", number: tag.0 });
            }
            state.grants.insert(tag, hold);
        }
        // The thread may be asleep, but a peer's writes need it.
        let _ = self.commands.try_send(Command::Wake);
        Ok(())
    }

    fn revoke(&self, tag: Tag, source: SourceState) -> TransferState {
        let released = {
            let mut state = self.shared.lock();
            match (state.grants.contains_key(&tag), source) {
                (false, _) => {
                    let number = tag.0;
                    return TransferState::Failed(TransportError::Unknown { what: "grant", number });
                }
                (true, SourceState::Unknown) => {
                    let reason = "the source may still write".to_owned();
                    let peer = format!("of grant {}", tag.0);
                    return TransferState::Quarantined(TransportError::PeerGone { peer, reason });
                }
                (true, _) => state.grants.remove(&tag),
            }
        };
        // Without the lock: the hold is the caller's code.
        drop(released);
        TransferState::Done
    }

    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError> {
        let job = self.shared.lock().job(submission)?;
        let id = job.id;
        if self.commands.send(Command::Submit(Box::new(job))).is_err() {
            self.shared.lock().transfers.remove(&id);
            return Err(TransportError::Closed);
        }
        Ok(id)
    }

    fn poll(&self, transfer: TransferId, waker: Option<&Waker>) -> TransferState {
        let mut state = self.shared.lock();
        let is_gone = state.is_gone;
        let Some(known) = state.transfers.get_mut(&transfer) else {
            let number = transfer.0;
            return TransferState::Failed(TransportError::Unknown { what: "transfer", number });
        };
        if is_gone && !matches!(known.phase, Phase::Over(_)) {
            // Submitted while the thread was ending.
            known.phase = Phase::Over(Some(TransportError::Closed));
        }
        match &known.phase {
            Phase::Over(_) => {
                let Some(Transfer { phase: Phase::Over(error), .. }) = state.transfers.remove(&transfer)
                else {
                    unreachable!("seen under the same lock");
                };
                error.map_or(TransferState::Done, TransferState::Failed)
            }
            phase => {
                let reported = match phase {
                    Phase::Quarantined(reason) => TransferState::Quarantined(reason.clone()),
                    _ => TransferState::InFlight,
                };
                if let Some(waker) = waker {
                    known.waker = Some(waker.clone());
                }
                reported
            }
        }
    }

    fn cancel(&self, transfer: TransferId) -> TransferState {
        let _ = self.commands.send(Command::Cancel { transfer });
        let mut state = self.shared.lock();
        // The thread soon sets one of the two.
        while !state.is_gone
            && let Some(Transfer { phase: Phase::InFlight, .. }) = state.transfers.get(&transfer)
        {
            self.shared.ended.wait(&mut state);
        }
        drop(state);
        self.poll(transfer, None)
    }

    fn drain(&self, deadline: Instant) -> usize {
        let left = |state: &State| {
            let moving = state.transfers.values().filter(|t| !matches!(t.phase, Phase::Over(_))).count();
            moving + state.grants.len()
        };
        let mut state = self.shared.lock();
        state.is_closed = true;
        loop {
            let (open, now) = (left(&state), Instant::now());
            if open == 0 || now >= deadline {
                return open;
            }
            self.shared.ended.wait_until(&mut state, deadline);
        }
    }
}

fn check_grant(region: &Region, runs: &[Run]) -> Result<(), TransportError> {
    match region.check_runs(runs, "the storage")? {
        0 => Err(TransportError::FramesDiffer { local: 0, remote: 0 }),
        _ => Ok(()),
    }
}

impl Drop for NixlTransport {
    fn drop(&mut self) {
        self.stop();
    }
}
