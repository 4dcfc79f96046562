//! The conformance suite of transports, over every path.
//!
//! Its ends are connected by their metadata alone. Here these also state the address, and an end
//! that does not have a link to a peer yet connects.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};

use kvpool::storage::Storage;
use kvpool::transport::{
    Grant, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use kvpool_node::transport::tcp::{Address, Endpoint, Identity, Link, PeerSettings, TcpTransport};
use kvpool_node::wire;
use kvpool_testkit::transport_suite;
use tokio::runtime::Handle;

use crate::support::*;

struct End {
    runtime: Handle,
    endpoint: Arc<Endpoint>,
    transport: Arc<TcpTransport>,
    links: Arc<Mutex<Vec<Link>>>,
}

impl End {
    fn new(runtime: &Handle, identity: Identity, address: Address) -> Self {
        let endpoint = Arc::new(runtime.block_on(listen(identity, address, limits())));
        let transport = {
            let _runtime = runtime.enter();
            Arc::new(TcpTransport::new(&endpoint))
        };
        let links = Arc::default();
        let end = Self { runtime: runtime.clone(), endpoint, transport, links };
        let (endpoint, transport, links) =
            (Arc::downgrade(&end.endpoint), Arc::downgrade(&end.transport), end.links.clone());
        runtime.spawn(async move {
            while let Some(endpoint) = endpoint.upgrade() {
                let accepted = tokio::time::timeout(Duration::from_millis(50), endpoint.accept()).await;
                if let (Ok(Ok(link)), Some(transport)) = (accepted, transport.upgrade()) {
                    let _ = transport.attach(&link);
                    links.lock().unwrap().push(link);
                }
            }
        });
        end
    }

    fn address(&self) -> String {
        match &self.endpoint.addresses()[0] {
            Address::Tcp(address) => address.to_string(),
            Address::Unix(path) => path.display().to_string(),
            address => panic!("{address}"),
        }
    }
}

impl Transport for End {
    fn name(&self) -> &'static str {
        self.transport.name()
    }
    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError> {
        self.transport.register(storage)
    }
    fn metadata(&self) -> Vec<u8> {
        wire::encode(&(self.transport.metadata(), self.address()), 1000).unwrap()
    }
    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError> {
        let invalid = |error: wire::WireError| TransportError::Metadata(error.to_string());
        let (metadata, address): (Vec<u8>, String) = wire::decode(metadata).map_err(invalid)?;
        // The peer may have connected a moment ago.
        for _ in 0..20 {
            match self.transport.add_peer(&metadata) {
                Err(TransportError::PeerGone { .. }) => std::thread::sleep(Duration::from_millis(5)),
                added => return added,
            }
        }
        let (name, _): (String, u64) = wire::decode(&metadata).map_err(invalid)?;
        let address = address.parse().map_or_else(|_| Address::Unix(address.into()), Address::Tcp);
        let link = self.runtime.block_on(self.endpoint.connect(&PeerSettings::new(&name, address)));
        let link =
            link.map_err(|error| TransportError::PeerGone { peer: name, reason: error.to_string() })?;
        let peer = self.transport.attach(&link)?;
        self.links.lock().unwrap().push(link);
        Ok(peer)
    }
    fn remove_peer(&self, peer: PeerId) {
        self.transport.remove_peer(peer);
    }
    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.transport.grant(grant) }
    }
    fn revoke(&self, tag: Tag, source: SourceState) -> TransferState {
        self.transport.revoke(tag, source)
    }
    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.transport.submit(submission) }
    }
    fn poll(&self, transfer: TransferId, waker: Option<&Waker>) -> TransferState {
        self.transport.poll(transfer, waker)
    }
    fn cancel(&self, transfer: TransferId) -> TransferState {
        self.transport.cancel(transfer)
    }
    fn drain(&self, deadline: Instant) -> usize {
        self.transport.drain(deadline)
    }
}

fn conforms(path: Path) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let authority = Authority::new();
    let ends = AtomicU64::new(0);
    transport_suite::all(&|| {
        let name = format!("n{}", ends.fetch_add(1, Ordering::Relaxed));
        let mut node = identity(&name);
        if let Path::Tls = path {
            node = node.tls(authority.mutual(&name));
        }
        let address = if let Path::Unix = path { Address::Unix(socket_path()) } else { loopback() };
        Arc::new(End::new(runtime.handle(), node, address))
    });
}

#[test]
fn tcp_conforms() {
    conforms(Path::Plain);
}

#[test]
fn unix_sockets_conform() {
    conforms(Path::Unix);
}

#[test]
fn tls_conforms() {
    conforms(Path::Tls);
}
