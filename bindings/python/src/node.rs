//! `Node`: a pool whose sequences can move to pools of other processes and hosts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvpool_node::settings;
use kvpool_node::transport::tcp::{Address, PeerSettings, Tls, Token};
use kvpool_node::{Arrivals, Node, NodeBuilder, NodeCounters};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::Mutex;

use crate::args::Seconds;
use crate::call::Call;
use crate::error::{Failure, Outcome, invalid};
use crate::exclusive::Open;
use crate::pool::PyPool;
use crate::process::Own;
use crate::record::record;
use crate::returned::{Received, Returned};
use crate::sequence::PySequence;

/// A pool with links to the pools of other processes. `await Node.start(pool, ...)` makes one.
///
/// While it is open, its peers are targets of `Pool.migrate` by their names. Sequences of peers
/// arrive from `async for sequence, peer in node`.
#[pyclass(frozen, name = "Node", module = "kvpool._kvpool")]
pub struct PyNode {
    node: Open<Node>,
    arrivals: Own<Arc<Mutex<Arrivals>>>,
    returned: Arc<Returned<(PySequence, String)>>,
}

record! {
    /// A migration, as one of its nodes sees it.
    MigrationState {
        /// Id, the same on both nodes.
        id: String,
        /// Name of the other node.
        peer: String,
        /// Id of the sequence; None for cached blocks.
        sequence: Option<u64>,
        /// State.
        state: String,
        /// Blocks of the migration.
        blocks: usize,
        /// Bytes that were transferred so far.
        bytes: u64,
        /// Milliseconds since the beginning, or from the beginning to the end.
        time_ms: u64,
        /// Why it failed, if it did.
        reason: Option<String>,
    }
}

record! {
    /// Counts since a node began.
    NodeStats {
        /// Migrations, offloads and fetches that it sent, and that arrived.
        sent: u64,
        /// Those that it received.
        received: u64,
        /// Those that a target refused.
        refused: u64,
        /// Those that failed otherwise.
        failed: u64,
        /// Blocks that arrived with wrong checksums.
        bad_blocks: u64,
        /// Cached blocks that were dropped when a peer asked for them, because the memory had damaged them.
        damaged_blocks: u64,
        /// Times that the owner of a sequence was in doubt.
        in_doubt: u64,
        /// Bytes that it wrote to peers.
        sent_bytes: u64,
    }
}

/// Reads `host:port` or `unix:/path`. A name is resolved when it is used.
pub fn address(text: &str) -> Outcome<Address> {
    let read = text.parse::<settings::Address>().map(Address::from);
    read.map_err(|error| invalid(format!("{text:?} is neither host:port nor unix:/path: {error}")))
}

async fn start(
    mut builder: NodeBuilder,
    listen: Vec<String>,
    peers: HashMap<String, String>,
    token: Option<Vec<u8>>,
    tls: Option<[Vec<u8>; 3]>,
) -> Outcome<PyNode> {
    for text in &listen {
        builder = builder.listen(address(text)?);
    }
    let peers: Outcome<Vec<_>> =
        peers.iter().map(|(name, text)| Ok(PeerSettings::new(name, address(text)?))).collect();
    builder = builder.peers(peers?);
    if let Some(token) = token {
        builder = builder.token(Token::new(&token)?);
    }
    if let Some([certificates, key, authorities]) = tls {
        builder = builder.tls(Tls::mutual(&certificates, &key, &authorities)?);
    }
    let (node, arrivals) = builder.start().await?;
    let arrivals = Own::new(Arc::new(Mutex::new(arrivals)));
    Ok(PyNode { node: Open::new("node", node), arrivals, returned: Arc::default() })
}

#[pymethods]
impl PyNode {
    /// Starts a node of a pool with storage.
    ///
    /// Addresses are "host:port" or "unix:/path"; port 0 selects a free one. `peers` has the
    /// addresses of other nodes by name. Beyond the loopback, links need `tls`: certificates, key and
    /// authorities in PEM. `token` is a secret that both ends have.
    ///
    /// `restarts` tells when another process of a peer's name shows that the former one has ended:
    /// "proven", or "by-name" where at most one process of a name lives. After `doubt_limit`
    /// seconds without a link to its target, a sequence in doubt is this node's own again; if the
    /// target lives, both may run it.
    #[staticmethod]
    #[pyo3(signature = (pool, name, *, listen=Vec::new(), peers=HashMap::new(), token=None, tls=None, restarts="proven", doubt_limit=None), text_signature = r#"(pool, name, *, listen=(), peers={}, token=None, tls=None, restarts="proven", doubt_limit=None)"#)]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn start(
        pool: &Bound<'_, PyPool>,
        name: String,
        listen: Vec<String>,
        peers: HashMap<String, String>,
        token: Option<&Bound<'_, PyBytes>>,
        tls: Option<(Bound<'_, PyBytes>, Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
        restarts: &str,
        doubt_limit: Option<Seconds>,
    ) -> Outcome<Call> {
        let mut builder = Node::builder(pool.get().share()?).name(name);
        let known = restarts.parse().map_err(|reason| invalid(format!("restarts={restarts:?}: {reason}")));
        builder = builder.restarts(known?);
        if let Some(Seconds(limit)) = doubt_limit {
            builder = builder.doubt_limit(limit);
        }
        let token = token.map(|token| token.as_bytes().to_vec());
        let pem = |bytes: Bound<'_, PyBytes>| bytes.as_bytes().to_vec();
        let tls = tls.map(|(certificates, key, authorities)| [pem(certificates), pem(key), pem(authorities)]);
        Ok(Call::new(move |caller| caller.waits(start(builder, listen, peers, token, tls))))
    }

    /// Its name.
    #[getter]
    fn name(&self) -> Outcome<String> {
        Ok(self.node.get()?.name().to_owned())
    }

    /// Addresses at which peers reach it, with the ports that the system selected.
    #[getter]
    fn addresses(&self) -> Outcome<Vec<String>> {
        Ok(self.node.get()?.addresses().iter().map(ToString::to_string).collect())
    }

    /// Replaces the configured peers: addresses by name.
    fn set_peers(&self, peers: HashMap<String, String>) -> Outcome<()> {
        let peers: Outcome<Vec<_>> =
            peers.iter().map(|(name, text)| Ok(PeerSettings::new(name, address(text)?))).collect();
        self.node.get()?.set_peers(peers?);
        Ok(())
    }

    /// Returns counts since it began.
    fn stats(&self) -> Outcome<NodeStats> {
        let counters = self.node.get()?.counters();
        let NodeCounters { sent, received, refused, failed, bad_blocks, .. } = counters;
        let NodeCounters { damaged_blocks, in_doubt, sent_bytes, .. } = counters;
        Ok(NodeStats { sent, received, refused, failed, bad_blocks, damaged_blocks, in_doubt, sent_bytes })
    }

    /// Returns the peers, and whether a link to each is up.
    fn peers(slf: &Bound<'_, Self>) -> Outcome<Call> {
        let node = slf.get().node.share()?;
        Ok(Call::new(move |caller| {
            caller.waits(async move { Ok(node.peers().await?.into_iter().collect::<HashMap<_, _>>()) })
        }))
    }

    /// Returns the migrations under way and the latest that ended, the newest first.
    fn migrations(slf: &Bound<'_, Self>) -> Outcome<Call> {
        let node = slf.get().node.share()?;
        Ok(Call::new(move |caller| {
            caller.waits(async move {
                let records = node.migrations().await?.into_iter().map(|record| MigrationState {
                    id: record.id,
                    peer: record.peer,
                    sequence: record.sequence,
                    state: format!("{:?}", record.state).to_lowercase(),
                    blocks: record.blocks,
                    bytes: record.bytes,
                    time_ms: record.time_ms,
                    reason: record.reason,
                });
                Ok(records.collect::<Vec<_>>())
            })
        }))
    }

    /// Declares that the process of a peer has ended and will not come back, and returns the ids of
    /// the sequences that were in doubt and are this node's own again. If it lives, both may run
    /// them, and what it still writes by RDMA damages blocks of others. A peer with a link is
    /// refused.
    fn declare_ended(slf: &Bound<'_, Self>, peer: String) -> Outcome<Call> {
        let node = slf.get().node.share()?;
        Ok(Call::new(move |caller| caller.waits(async move { Ok(node.declare_ended(&peer).await?) })))
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(&self) -> Outcome<Call> {
        // Also of a closed node: what has arrived is there, before the end.
        self.node.check()?;
        let arrivals = Arc::clone(self.arrivals.get());
        let returned = Arc::clone(&self.returned);
        Ok(Call::new(move |caller| {
            let ended = || Failure::from(PyStopAsyncIteration::new_err("the node has ended"));
            caller.start(async move {
                let next = || async {
                    let arrival = arrivals.lock().await.recv().await?;
                    Some((PySequence::new(arrival.sequence), arrival.from))
                };
                let arrived = returned.or_next(next).await.ok_or_else(ended)?;
                Ok(Received::new(arrived, &returned))
            })
        }))
    }

    /// Ends the node in an orderly way: no migration begins, and those under way get `patience`
    /// seconds. Returns whether nothing was left. Closes the node.
    #[pyo3(signature = (patience=Seconds(Duration::from_secs(10))), text_signature = "($self, patience=10.0)")]
    fn shutdown(slf: &Bound<'_, Self>, patience: Seconds) -> Outcome<Call> {
        let (node, this) = (slf.get().node.share()?, slf.clone().unbind());
        Ok(Call::new(move |caller| {
            caller.waits(async move {
                let is_over = node.shutdown(patience.0).await;
                this.get().node.close()?;
                Ok(is_over)
            })
        }))
    }

    /// Ends the node at once: migrations under way fail, and their sequences stay.
    fn close(&self) -> Outcome<()> {
        self.node.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        match self.node.is_closed() {
            true => Ok("<kvpool.Node, closed>".to_owned()),
            false => Ok(format!("<kvpool.Node {}>", self.node.get()?.name())),
        }
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MigrationState>()?;
    module.add_class::<NodeStats>()?;
    module.add_class::<PyNode>()
}
