//! Ranks of one tensor-parallel split send their parts to ranks of another over TCP: one node for
//! each rank, all of this process.

#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvpool::storage::{Arrangement, Dtype, KvLayout, KvLayoutBuilder, KvPlanes, Scales};
use kvpool::transfer::HeadRange;
use kvpool::{Pool, Run, Sequence, SequenceId, TransferError};
use kvpool_node::admin::{MigrationRecord, MigrationState};
use kvpool_node::protocol::{MigrationId, Part, PartFault};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Arrivals, Node, NodeBuilder, NodeError, PartError, SendPartError};
use kvpool_testkit::rng::Rng;

const WAIT: Duration = Duration::from_secs(20);
const HEADS: usize = 8;
const TOKENS: usize = 45;
const BLOCKS: usize = TOKENS.div_ceil(4);

fn model() -> KvLayoutBuilder {
    KvLayout::builder().layers(3).kv_heads(HEADS).head_dim(8).block_tokens(4)
}

fn other(builder: KvLayoutBuilder) -> KvLayoutBuilder {
    builder.parts(KvPlanes::Joined).arrangement(Arrangement::BlockFirst)
}

fn pool(layout: KvLayout) -> Pool {
    kv::pool(layout, 60)
}

/// The packed blocks of a model with all heads in one rank, as random bytes.
fn whole(layout: &KvLayout) -> Vec<Vec<u8>> {
    (0..BLOCKS as u64).map(|block| Rng(block).bytes(layout.packed_bytes())).collect()
}

/// The heads of one rank, cut out of a packed block by counting rows.
fn cut(layout: &KvLayout, block: &[u8], first: usize, count: usize) -> Vec<u8> {
    let mut units = vec![8 * layout.dtype().bytes()];
    if *layout.scales() == Scales::PerTokenHead {
        units.push(4);
    }
    let (mut out, mut at) = (Vec::new(), 0);
    for _ in 0..layout.layers() {
        for &unit in &units {
            // K and V of each token.
            for _ in 0..2 * layout.block_tokens() {
                out.extend_from_slice(&block[at + first * unit..][..count * unit]);
                at += HEADS * unit;
            }
        }
    }
    assert_eq!(at, block.len());
    out
}

/// Opens a sequence whose blocks have these bytes.
fn open(pool: &Pool, blocks: &[Vec<u8>]) -> Sequence {
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let mut sequence = pool.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let cached = sequence.len();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, TOKENS - cached).unwrap();
    for (id, bytes) in sequence.blocks().zip(blocks).skip(cached / 4) {
        let runs = [Run { start: pool.blocks().frame(id), len: 1 }];
        // SAFETY: the sequence owns the block, and this is the only thread.
        unsafe { pool.storage().unwrap().unpack(&runs, bytes) }.unwrap();
    }
    batch.finish();
    sequence
}

fn contents(pool: &Pool, sequence: &Sequence) -> Vec<Vec<u8>> {
    let block = |id| {
        let mut bytes = vec![0; pool.layout().packed_bytes()];
        let runs = [Run { start: pool.blocks().frame(id), len: 1 }];
        // SAFETY: no other thread accesses the blocks.
        unsafe { pool.storage().unwrap().pack(&runs, &mut bytes) }.unwrap();
        bytes
    };
    sequence.blocks().map(block).collect()
}

/// A rank of a split: its node, its heads, and the bytes of its blocks.
struct Rank {
    node: Node,
    arrivals: Arrivals,
    blocks: Vec<Vec<u8>>,
}

impl Rank {
    fn pool(&self) -> &Pool {
        self.node.pool()
    }

    fn open(&self) -> Sequence {
        open(self.pool(), &self.blocks)
    }

    async fn arrival(&mut self) -> Sequence {
        tokio::time::timeout(WAIT, self.arrivals.recv()).await.expect("an arrival").unwrap().sequence
    }

    /// Waits until the pool owns nothing.
    async fn is_idle(&self) {
        let empty = async {
            while self.pool().sequence_count() > 0 || self.pool().stats().used > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, empty).await.expect("an idle pool");
        kv::is_idle(self.pool());
    }

    /// Waits until the sources have said their commit.
    async fn has_agreed(&self) {
        let agreed = async {
            let is_it = |record: &MigrationRecord| record.state == MigrationState::Committing;
            while !self.node.migrations().await.unwrap().iter().any(is_it) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, agreed).await.expect("a commit that was said");
    }
}

/// Starts the ranks of a split, with links to these peers.
async fn ranks(builder: &KvLayoutBuilder, name: &str, count: usize, peers: &[Rank]) -> Vec<Rank> {
    let mut all = Vec::new();
    for rank in 0..count {
        all.push(start(builder, name, (rank, count), peers, |node| node).await);
    }
    all
}

async fn start(
    builder: &KvLayoutBuilder,
    name: &str,
    (rank, ranks): (usize, usize),
    peers: &[Rank],
    set: impl FnOnce(NodeBuilder) -> NodeBuilder,
) -> Rank {
    let whole_layout = builder.clone().build().unwrap();
    let layout = builder.clone().tensor_parallel(ranks).build().unwrap();
    let heads = HeadRange::of_rank(&layout, rank).unwrap();
    let (first, share) = (heads.heads().start as usize, heads.heads().len());
    let blocks = whole(&whole_layout).iter().map(|block| cut(&whole_layout, block, first, share)).collect();
    let address = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let node = Node::builder(pool(layout)).name(format!("{name}{rank}")).heads(heads).listen(address);
    let to = |peer: &Rank| PeerSettings::new(peer.node.name(), peer.node.addresses()[0].clone());
    let (node, arrivals) = set(node.peers(peers.iter().map(to).collect())).start().await.unwrap();
    for peer in peers {
        linked(&node, peer.node.name()).await;
    }
    Rank { node, arrivals, blocks }
}

async fn linked(node: &Node, peer: &str) {
    let up = async {
        while !node.peers().await.unwrap().contains(&(peer.to_owned(), true)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, up).await.expect("a link");
}

fn part(index: usize, of: usize) -> Part {
    Part { index: index as u16, of: of as u16 }
}

/// Sends what each source has of a target's heads, and checks what arrives.
async fn between(from: &KvLayoutBuilder, to: &KvLayoutBuilder, sources: usize, targets: usize) {
    let mut there = ranks(to, "target", targets, &[]).await;
    let here = ranks(from, "source", sources, &there).await;
    let sequences: Vec<Sequence> = here.iter().map(Rank::open).collect();
    let (feeds, fed) = (sources.div_ceil(targets), targets.div_ceil(sources));
    for (number, target) in there.iter_mut().enumerate() {
        let of_target = number / fed * feeds..(number / fed + 1) * feeds;
        let copy = MigrationId(number as u128 + 1);
        let sends = of_target.clone().enumerate().map(|(index, source)| {
            let export = here[source].pool().export_copy(&sequences[source]).unwrap();
            here[source].node.send_part(export, copy, part(index, feeds), target.node.name())
        });
        for sent in join(sends.collect()).await {
            assert_eq!(sent.unwrap().carried.blocks, BLOCKS);
        }
        let sequence = target.arrival().await;
        assert_eq!((sequence.id(), sequence.len()), (SequenceId(7), TOKENS));
        assert!(contents(target.pool(), &sequence) == target.blocks, "target {number} of {targets}");
        drop(sequence);
        assert!(target.arrivals.try_recv().is_none(), "it arrives once");
        target.is_idle().await;
    }
    drop(sequences);
    for source in &here {
        source.is_idle().await;
    }
}

/// Polls futures together, and returns their results in order.
async fn join<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, result) in &mut futures {
            if result.is_none()
                && let std::task::Poll::Ready(ready) = future.as_mut().poll(cx)
            {
                *result = Some(ready);
            }
        }
        match futures.iter().all(|(_, result)| result.is_some()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    futures.into_iter().filter_map(|(_, result)| result).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_ranks_feed_two() {
    between(&model(), &other(model()), 4, 2).await;
    let scaled = || model().dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead);
    between(&other(scaled()), &scaled(), 4, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_rank_feeds_two() {
    between(&model(), &other(model()), 1, 2).await;
}

/// A sequence that moves is closed by each of its sources, and is open at the target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_sequence_that_moves() {
    let mut there = ranks(&model(), "target", 1, &[]).await;
    let here = ranks(&model(), "source", 2, &there).await;
    let sends = here.iter().enumerate().map(|(index, rank)| {
        let export = rank.pool().export(rank.open()).unwrap();
        rank.node.send_part(export, MigrationId(5), part(index, 2), "target0")
    });
    for sent in join(sends.collect()).await {
        sent.unwrap();
    }
    for rank in &here {
        assert_eq!(rank.pool().sequence_count(), 0);
        rank.is_idle().await;
    }
    let sequence = there[0].arrival().await;
    assert!(contents(there[0].pool(), &sequence) == there[0].blocks);
    // Its prefix is found there.
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let again = there[0].pool().sequence(SequenceId(8)).tokens(&tokens).unwrap();
    assert_eq!(again.len(), TOKENS / 4 * 4);
    drop((sequence, again));
    there[0].is_idle().await;
}

/// Two of three sources have agreed; one of them dies, and another process takes its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_dies_ends_the_copy_on_all_sides() {
    let there = ranks(&model(), "target", 1, &[]).await;
    let mut here = ranks(&model(), "source", 2, &there).await;
    let second = here.pop().unwrap();
    let first = here.pop().unwrap();
    let export = second.pool().export(second.open()).unwrap();
    let second = Arc::new(second);
    let dies = tokio::spawn({
        let second = second.clone();
        async move { drop(second.node.send_part(export, MigrationId(5), part(1, 3), "target0").await) }
    });
    let export = first.pool().export(first.open()).unwrap();
    let first = Arc::new(first);
    let survives = tokio::spawn({
        let first = first.clone();
        async move { first.node.send_part(export, MigrationId(5), part(0, 3), "target0").await }
    });
    first.has_agreed().await;
    second.has_agreed().await;
    assert_eq!(there[0].pool().stats().used, BLOCKS);
    dies.abort();
    let _ = dies.await;
    drop(Arc::try_unwrap(second).ok().expect("the last one"));
    let _next = start(&model(), "source", (1, 2), &there, |node| node).await;
    let SendPartError { error, export } =
        tokio::time::timeout(WAIT, survives).await.unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("another part of the copy has ended"), "{error}");
    let sequence = export.cancel().expect("it is as before");
    assert!(contents(first.pool(), &sequence) == first.blocks);
    drop(sequence);
    first.is_idle().await;
    there[0].is_idle().await;
    let mut there = there;
    assert!(there[0].arrivals.try_recv().is_none());
}

async fn refused(rank: &Rank, of: Part, to: &str) -> PartError {
    let export = rank.pool().export(rank.open()).unwrap();
    let failed = rank.node.send_part(export, MigrationId(of.of.into()), of, to).await.unwrap_err();
    let sequence = failed.export.cancel().expect("it is as before");
    assert!(contents(rank.pool(), &sequence) == rank.blocks);
    drop(sequence);
    rank.is_idle().await;
    failed.error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_refused_with_the_reason() {
    let there = ranks(&model(), "target", 2, &[]).await;
    let source = &ranks(&model(), "source", 4, &there).await[0];
    // Only the first of the target's two sources.
    let missing = refused(source, part(0, 1), "target0").await;
    assert!(missing.to_string().contains("no part has 2 of the node's 4 heads"), "{missing}");
    let foreign = refused(source, part(0, 1), "target1").await;
    assert!(foreign.to_string().contains("heads"), "{foreign}");
    let number = refused(source, part(3, 2), "target0").await;
    assert!(number.to_string().contains("part 3 of 2 of the copy: it does not exist"), "{number}");
    for target in &there {
        target.is_idle().await;
    }
    // Another pool's frames are written by others.
    let stranger = pool(source.pool().layout().clone());
    let export = stranger.export(open(&stranger, &source.blocks)).unwrap();
    let failed = source.node.send_part(export, MigrationId(9), part(0, 2), "target0").await.unwrap_err();
    assert_eq!(failed.error, PartError::ForeignExport);
    drop(failed);
    kv::is_idle(&stranger);
    drop(source.open());
    let cached = source.pool().export_cached(3).unwrap();
    let failed = source.node.send_part(cached, MigrationId(9), part(0, 2), "target0").await.unwrap_err();
    let fault = PartFault::Cached;
    assert_eq!(failed.error, PartError::Part { part: part(0, 2), fault });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_in_parts_takes_one_place_of_the_arrivals() {
    let mut there = [start(&model(), "target", (0, 1), &[], |node| node.arrivals(1)).await];
    let here = ranks(&model(), "source", 2, &there).await;
    // The place of a copy that has ended is free again: so the second one arrives too.
    for copy in 0..2 {
        let send = |rank: usize| {
            let export = here[rank].pool().export(here[rank].open()).unwrap();
            here[rank].node.send_part(export, MigrationId(copy), part(rank, 2), "target0")
        };
        let (first, second) = tokio::join!(send(0), send(1));
        first.unwrap();
        second.unwrap();
        drop(there[0].arrival().await);
    }
    there[0].is_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_for_parts_is_bounded() {
    let blocks = whole(&model().tensor_parallel(2).build().unwrap());
    let needed = (BLOCKS * blocks[0].len()) as u64;
    for (bytes, fits) in [(needed - 1, false), (needed, true)] {
        let there = [start(&model(), "target", (0, 1), &[], |node| node.staging_bytes(bytes)).await];
        let here = ranks(&model(), "source", 2, &there).await;
        let export = here[0].pool().export(here[0].open()).unwrap();
        let sending = here[0].node.send_part(export, MigrationId(5), part(0, 2), "target0");
        if !fits {
            let failed = sending.await.unwrap_err();
            let want = format!("{needed} bytes are needed until they are checked, and {bytes} are free");
            assert!(failed.to_string().contains(&want), "{failed}");
            there[0].is_idle().await;
            continue;
        }
        // The next part finds room when the first one is checked.
        let second = async {
            here[0].has_agreed().await;
            let export = here[1].pool().export(here[1].open()).unwrap();
            here[1].node.send_part(export, MigrationId(5), part(1, 2), "target0").await.unwrap();
        };
        let (sent, ()) = tokio::join!(sending, second);
        sent.unwrap();
    }
}

/// A whole copy, or a part, of blocks that differ in more than their heads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_block_sizes_and_static_scales() {
    let scaled = |scale: f32| {
        let scales = || vec![scale; 3 * HEADS].into();
        model().dtype(Dtype::Fp8E4M3).scales(Scales::PerHead { k: scales(), v: scales() })
    };
    for (from, to, reason) in [
        (model(), model().block_tokens(8), "tokens: got 4"),
        (scaled(2.0), scaled(3.0), "scale"),
        (model(), model().dtype(Dtype::F16), "f16"),
    ] {
        let there = ranks(&to, "target", 1, &[]).await;
        let here = ranks(&from, "source", 1, &there).await;
        let moved = here[0].pool().migrate_to_node(here[0].open(), "target0").await.unwrap_err();
        assert_eq!(moved.error, TransferError::OtherLayout { node: "target0".into() });
        drop(moved);
        let part = refused(&here[0], part(0, 1), "target0").await.to_string();
        assert!(part.contains("the manifest does not fit") && part.contains(reason), "{part}");
        there[0].is_idle().await;
    }
}

#[tokio::test]
async fn a_node_must_know_its_heads() {
    let layout = model().tensor_parallel(2).build().unwrap();
    let heads = HeadRange::new(0, 8, 8).unwrap();
    let started = Node::builder(pool(layout.clone())).heads(heads).start().await;
    assert!(matches!(started, Err(NodeError::Heads { layout: 4, .. })));
    let (node, _arrivals) = Node::builder(pool(layout)).start().await.unwrap();
    let rank = Rank { node, arrivals: _arrivals, blocks: Vec::new() };
    let export = rank.pool().export(rank.open()).unwrap();
    let failed = rank.node.send_part(export, MigrationId(5), part(0, 2), "other").await.unwrap_err();
    assert_eq!(failed.error, PartError::HeadsUnknown);
}
