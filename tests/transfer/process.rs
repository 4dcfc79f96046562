//! The transport within the process.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvpool::storage::{HostStorage, Storage};
use kvpool::transport::{
    Grant, Operation, SourceState, Submission, Tag, TransferState, Transport, TransportError,
};
use kvpool::{DeviceId, FrameId, Process, Run, StorageError};

use super::kv::plain;

#[test]
fn the_conformance_suite() {
    kvpool_testkit::transport_suite::all(&|| Arc::new(Process::new()));
}

/// Host memory that poses as a device's, and stops in a transfer until it is told to continue.
#[derive(Debug)]
struct Slow {
    host: HostStorage,
    arrived: mpsc::Sender<()>,
    may_go: Mutex<mpsc::Receiver<()>>,
}

// All but `receive` is forwarded to host memory. The frame rule is the caller's.
impl Storage for Slow {
    kvpool_testkit::as_on_the_host!(host);

    fn device(&self) -> DeviceId {
        DeviceId::Cuda(1)
    }

    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        self.arrived.send(()).unwrap();
        self.may_go.lock().unwrap().recv().unwrap();
        // SAFETY: see above.
        unsafe { self.host.receive(source, from, to) }
    }
}

/// While bytes are being written, a revoked grant is quarantined, and a drain counts the copy.
#[test]
fn a_grant_that_is_revoked_during_a_copy() {
    let (arrived, is_there) = mpsc::channel();
    let (goes_on, may_go) = mpsc::channel();
    let host = |frames| HostStorage::new(plain(), frames, frames).unwrap();
    let from: Arc<dyn Storage> = Arc::new(host(4));
    let to: Arc<dyn Storage> = Arc::new(Slow { host: host(4), arrived, may_go: Mutex::new(may_go) });
    let (source, target) = (Process::new(), Process::new());
    let (region, into) = (source.register(&from).unwrap(), target.register(&to).unwrap());
    let peer = source.add_peer(&target.metadata()).unwrap();
    let writer = target.add_peer(&source.metadata()).unwrap();
    let runs = vec![Run { start: FrameId(0), len: 2 }];
    let (ours, theirs) = (Arc::new(()), Arc::new(()));
    let grant = Grant { tag: Tag(5), region: into, runs: runs.clone(), peer: writer, hold: theirs.clone() };
    // SAFETY: this test accesses no frame.
    unsafe { target.grant(grant) }.unwrap();
    kvpool_testkit::threads::scope(|scope| {
        let hold = ours.clone();
        let copying = scope.spawn(|| {
            let operation = Operation::Write;
            let (local, remote) = (runs.clone(), runs.clone());
            let submission =
                Submission { operation, region, peer, remote_region: into, local, remote, tag: Tag(5), hold };
            // SAFETY: as above.
            unsafe { source.submit(submission) }
        });
        is_there.recv().unwrap();
        assert!(matches!(target.revoke(Tag(5), SourceState::Unknown), TransferState::Quarantined(_)));
        assert_eq!((Arc::strong_count(&ours), Arc::strong_count(&theirs)), (2, 2));
        let soon = Instant::now() + Duration::from_millis(5);
        assert_eq!((source.drain(soon), target.drain(soon)), (1, 1));
        assert_eq!(Arc::strong_count(&theirs), 2, "bytes are still being written");
        goes_on.send(()).unwrap();
        let transfer = copying.join().unwrap().unwrap();
        assert!(matches!(source.poll(transfer, None), TransferState::Done));
        assert_eq!((Arc::strong_count(&ours), Arc::strong_count(&theirs)), (1, 1));
        assert_eq!((source.drain(soon), target.drain(soon)), (0, 0));
    });
}

/// Ends of other processes, and ends that are gone, are refused.
#[test]
fn metadata_of_no_living_end() {
    let process = Process::new();
    let gone = Process::new().metadata();
    assert!(matches!(process.add_peer(&gone), Err(TransportError::PeerGone { .. })));
    let mut other = process.metadata();
    other[10] ^= 1;
    for bad in [&other[..], &[], &process.metadata()[..20]] {
        assert!(matches!(process.add_peer(bad), Err(TransportError::Metadata(_))), "{bad:?}");
    }
}
