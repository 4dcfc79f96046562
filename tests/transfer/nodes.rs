//! Destinations on other nodes, by way of a node that lives in the same process.

use std::sync::{Arc, Mutex};

use kvpool::prefix::{BlockHash, PrefixKeys};
use kvpool::transfer::{Export, Fetched, Imported, Remote, RemoteFuture, Remotes, SendError, Sent};
use kvpool::{AnySequence, GroupedSequence, Pool, SequenceId, TransferError};

use super::kv::{admit, cached, check, is_idle, pools, prompt};

/// A node with one pool, which takes the bytes one block at a time.
pub struct Node {
    /// The pool that knows this node.
    near: Pool,
    pool: Pool,
    arrived: Mutex<Vec<GroupedSequence>>,
    manner: Manner,
    /// Hashes that each fetch asked for.
    pub fetched: Mutex<Vec<usize>>,
    /// Hashes of each question.
    pub asked: Mutex<Vec<usize>>,
}

/// How a node answers.
#[derive(Clone, Copy, Default)]
pub struct Manner {
    /// Most blocks that it sends at once.
    pub blocks_max: Option<usize>,
    /// It says that it has all blocks.
    pub lies: bool,
    /// Number of fetches before one fails.
    pub fails_after: Option<usize>,
}

impl Node {
    pub fn arrival(&self) -> GroupedSequence {
        self.arrived.lock().unwrap().pop().unwrap()
    }
}

struct Nodes(Arc<Node>);

impl Remotes for Nodes {
    fn remote(&self, name: &str) -> Option<Arc<dyn Remote>> {
        (name == "other").then(|| self.0.clone() as Arc<dyn Remote>)
    }
}

fn carry<S: AnySequence>(export: &mut Export<S>, to: &Pool) -> Result<(Imported, Sent), TransferError> {
    let mut import = to.import(&export.manifest()?)?;
    export.retain(&import.accepted())?;
    let mut sent = Sent { shared_blocks: import.shared_blocks(), ..Sent::default() };
    for place in import.missing().to_vec() {
        import.write(place, None, &export.packed(place)?)?;
        sent.carried.blocks += 1;
    }
    Ok((import.commit().map_err(|failed| failed.error)?, sent))
}

impl Remote for Node {
    fn send(&self, mut export: Export<GroupedSequence>) -> RemoteFuture<Result<Sent, SendError>> {
        let done = match carry(&mut export, &self.pool) {
            Ok((imported, sent)) => {
                self.arrived.lock().unwrap().extend(imported.into_grouped());
                Ok(Sent { finished: export.finish(), ..sent })
            }
            Err(error) => Err(SendError { error, export: Box::new(export) }),
        };
        Box::pin(async { done })
    }

    fn fetch(&self, mut hashes: Vec<BlockHash>) -> RemoteFuture<Result<Fetched, TransferError>> {
        let mut fetched = self.fetched.lock().unwrap();
        fetched.push(hashes.len());
        if self.manner.fails_after.is_some_and(|fetches| fetched.len() > fetches) {
            let failed = TransferError::Node { node: "other".into(), reason: "it fails".into() };
            return Box::pin(async { Err(failed) });
        }
        hashes.truncate(self.manner.blocks_max.unwrap_or(usize::MAX));
        let export = self.pool.export_prefix(&hashes);
        let done = export.and_then(|mut export| carry(&mut export, &self.near));
        Box::pin(async { Ok(Fetched { carried: done?.1.carried, ..Fetched::default() }) })
    }

    fn cached(&self, hashes: Vec<BlockHash>) -> RemoteFuture<Result<Vec<bool>, TransferError>> {
        self.asked.lock().unwrap().push(hashes.len());
        let mut cached = self.pool.has_cached(&hashes);
        cached.iter_mut().for_each(|cached| *cached |= self.manner.lies);
        Box::pin(async { Ok(cached) })
    }
}

fn nodes() -> (Pool, Pool, Arc<Node>, Arc<dyn Remotes>) {
    let (here, there) = pools(50);
    let (node, remotes) = linked(&here, &there, Manner::default());
    (here, there, node, remotes)
}

/// Makes the second pool that of a node which the first one knows as `other`.
pub fn linked(here: &Pool, there: &Pool, manner: Manner) -> (Arc<Node>, Arc<dyn Remotes>) {
    let (near, pool, arrived) = (here.clone(), there.clone(), Mutex::default());
    let (fetched, asked) = Default::default();
    let node = Arc::new(Node { near, pool, arrived, manner, fetched, asked });
    let remotes: Arc<dyn Remotes> = Arc::new(Nodes(node.clone()));
    here.set_remotes(&remotes).unwrap();
    (node, remotes)
}

#[tokio::test]
async fn sequences_go_to_a_node() {
    let (here, there, node, _remotes) = nodes();
    let tokens = prompt(1, 42);
    let sequence = admit(&here, 7, &tokens).unwrap();
    let report = here.replicate_to_node(&sequence, "other").await.unwrap();
    assert_eq!((report.tokens, report.carried.blocks, report.shared_blocks), (42, 11, 0));
    // The id is open there: the sequence comes back unchanged.
    let failed = here.migrate_to_node(sequence, "other").await.unwrap_err();
    assert!(matches!(failed.error, TransferError::Sequence(_)), "{failed}");
    check(&here, &failed.sequence, &tokens);
    let copy = node.arrival();
    check(&there, copy.group(0), &tokens);
    drop(copy);
    let report = here.migrate_to_node(*failed.sequence, "other").await.unwrap();
    assert_eq!((report.tokens, report.carried.blocks, report.shared_blocks), (42, 1, 10));
    assert_eq!(here.view(SequenceId(7)).map(|view| view.len()), None, "it is closed here");
    let sequence = node.arrival();
    check(&there, sequence.group(0), &tokens);
    drop(sequence);
    let counts = here.metrics().migrations.unwrap();
    assert_eq!((counts.replicated, counts.migrated, counts.failed, counts.refused), (1, 1, 0, 1));
    [here, there].iter().for_each(is_idle);
}

#[tokio::test]
async fn cached_blocks_go_to_a_node_and_come_back() {
    let (here, there, _node, _remotes) = nodes();
    let tokens = prompt(1, 42);
    drop(admit(&here, 7, &tokens).unwrap());
    let report = here.offload_to_node("other", 6).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks), (6, 6));
    assert_eq!(cached(&here, &tokens), 4);
    let back = here.bring_back_from_node("other", &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 6));
    let back = here.bring_back_from_node("other", &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 0));
    assert_eq!(cached(&here, &tokens), 10);
    [here, there].iter().for_each(is_idle);
}

#[tokio::test]
async fn nodes_that_are_not_known() {
    let (here, there, _node, remotes) = nodes();
    let tokens = prompt(1, 9);
    let unknown = |name: &str| TransferError::UnknownNode { name: name.into() };
    let sequence = admit(&here, 7, &tokens).unwrap();
    let failed = here.migrate_to_node(sequence, "third").await.unwrap_err();
    assert_eq!(failed.error, unknown("third"));
    drop(remotes);
    let failed = here.migrate_to_node(*failed.sequence, "other").await.unwrap_err();
    assert_eq!(failed.error, unknown("other"), "the node was dropped");
    assert_eq!(here.offload_to_node("other", 1).await.unwrap_err(), unknown("other"));
    let keys = PrefixKeys::new();
    assert_eq!(here.bring_back_from_node("other", &keys, &tokens).await.unwrap_err(), unknown("other"));
    drop(failed);
    [here, there].iter().for_each(is_idle);
}

#[tokio::test]
async fn a_pool_keeps_the_nodes_that_it_has() {
    let (here, _there, node, remotes) = nodes();
    let others: Arc<dyn Remotes> = Arc::new(Nodes(node.clone()));
    assert_eq!(here.set_remotes(&others), Err(TransferError::HasNodes { pool: here.tag() }));
    assert_eq!(here.set_remotes(&remotes), Err(TransferError::HasNodes { pool: here.tag() }));
    drop(remotes);
    here.set_remotes(&others).unwrap();
}
