//! Nodes over pools with several groups of layers: sequences with windows and states, and cached
//! blocks of all groups, go to a peer and come back with all their bytes.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::{
    AdmitRequest, Dtype, GroupedSequence, KvLayout, Pool, Sequence, SequenceId, Tokens, TransferError, Window,
};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Arrivals, Node, Offers, OffloadBelow};

const WAIT: Duration = Duration::from_secs(20);
const KEYS: PrefixKeys<'static> = PrefixKeys::new();

/// Frames of 32 bytes in the state.
const STATE: usize = 3;

/// A pool with a list of all tokens, a window of 9, and a state.
fn pool(blocks: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
    Pool::builder(layout.block_tokens(4).build().unwrap())
        .blocks(blocks)
        .groups([None, Some(Window::new(9).unwrap())])
        .states([STATE])
        .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
        .build()
        .unwrap()
}

/// What is stored for the last of some tokens depends on all of them, and on where it is.
fn stamp(place: usize, tokens: &[u32]) -> f32 {
    let mix = |sum: u32, token: &u32| sum.wrapping_mul(0x0100_0193) ^ token.wrapping_add(1);
    (tokens.iter().fold(0x811c_9dc5 ^ place as u32, mix) >> 8) as f32
}

fn state(tokens: &[u32]) -> Vec<u8> {
    (0..STATE * 8).flat_map(|word| stamp(100 + word, tokens).to_le_bytes()).collect()
}

fn append(pool: &Pool, sequence: &mut GroupedSequence, all: &[u32], tokens: usize) {
    let announced = sequence.group(0).announced();
    sequence.announce(&all[announced.min(all.len())..]).unwrap();
    let mut batch = pool.begin_batch();
    let new = batch.append_grouped(sequence, Tokens::Announced(tokens)).unwrap().tokens;
    for group in 0..2 {
        let stamps: Vec<f32> = new.clone().map(|position| stamp(group, &all[..=position])).collect();
        let [k, v] = [(&stamps[..]).into(), (&stamps[..]).into()];
        batch.store_grouped(sequence, (group, 0), new.clone(), k, v).unwrap();
    }
    batch.store_state(sequence, 0, &state(&all[..new.end])).unwrap();
    if new.end.is_multiple_of(4) {
        batch.checkpoint(sequence).unwrap();
    }
    batch.finish();
}

fn compute(pool: &Pool, id: u64, all: &[u32]) -> GroupedSequence {
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), all)).unwrap();
    check(pool, &sequence, all);
    while let Some(cut) = sequence.next_cut() {
        let tokens = cut - sequence.len();
        append(pool, &mut sequence, all, tokens);
    }
    let rest = all.len() - sequence.len();
    append(pool, &mut sequence, all, rest);
    sequence
}

/// Checks what the next token sees in each group.
fn check(pool: &Pool, sequence: &GroupedSequence, all: &[u32]) {
    let (batch, length) = (&mut pool.begin_batch(), sequence.len());
    for (group, window) in [(0, usize::MAX), (1, 9)] {
        for position in (0..length).filter(|position| position.saturating_add(window) > length) {
            let (mut k, mut v) = ([0.0], [0.0]);
            let tokens = position..position + 1;
            batch.load(sequence.group(group), 0, tokens, (&mut k[..]).into(), (&mut v[..]).into()).unwrap();
            let expected = [stamp(group, &all[..=position])];
            assert_eq!((k, v), (expected, expected), "token {position} of {length} in group {group}");
        }
    }
    if length > 0 {
        let mut read = vec![0; STATE * 32];
        batch.load_state(sequence, 0, &mut read).unwrap();
        assert_eq!((sequence.state_tokens(), read), (length, state(&all[..length])));
    }
}

fn hit(pool: &Pool, all: &[u32]) -> usize {
    let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(99), all)).unwrap();
    check(pool, &sequence, all);
    sequence.len()
}

async fn start(name: &str, pool: Pool, peer: Option<&Node>) -> (Node, Arrivals) {
    let local = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let peer = peer.map(|node| PeerSettings::new(node.name(), node.addresses()[0].clone()));
    let builder = Node::builder(pool).name(name).listen(local).peers(peer.into_iter().collect());
    builder.start().await.unwrap()
}

async fn pair(blocks: [usize; 2]) -> [(Node, Arrivals); 2] {
    let b = start("b", pool(blocks[1]), None).await;
    let a = start("a", pool(blocks[0]), Some(&b.0)).await;
    for (node, peer) in [(&a.0, "b"), (&b.0, "a")] {
        let linked = async {
            while !node.peers().await.unwrap().contains(&(peer.to_owned(), true)) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, linked).await.expect("a link");
    }
    [a, b]
}

async fn arrival(arrivals: &mut Arrivals<GroupedSequence>) -> GroupedSequence {
    tokio::time::timeout(WAIT, arrivals.recv()).await.expect("an arrival").unwrap().sequence
}

/// Waits until the pool owns nothing.
async fn idle(pool: &Pool) {
    let empty = async {
        while pool.sequence_count() > 0 || pool.stats().used > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, empty).await.expect("an idle pool");
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held), (0, 0), "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_moves_and_continues_and_comes_back() {
    let [(a, to_a), (b, to_b)] = pair([200, 200]).await;
    let (mut to_a, mut to_b) = (to_a.grouped(), to_b.grouped());
    let all: Vec<u32> = (0..160).collect();
    for round in 0..20 {
        let length = 1 + round * 5;
        let sequence = compute(a.pool(), round as u64, &all[..length]);
        a.pool().migrate_to_node(sequence, "b").await.unwrap();
        let mut sequence = arrival(&mut to_b).await;
        check(b.pool(), &sequence, &all[..length]);
        append(b.pool(), &mut sequence, &all[..length + 13], 13);
        let mut moved = b.pool().migrate_to_node(sequence, "a").await;
        while let Err(failed) = moved {
            // Until the first source has forgotten.
            tokio::time::sleep(Duration::from_millis(5)).await;
            check(b.pool(), &failed.sequence, &all[..length + 13]);
            moved = b.pool().migrate_to_node(*failed.sequence, "a").await;
        }
        let mut sequence = arrival(&mut to_a).await;
        assert_eq!((sequence.id(), sequence.len()), (SequenceId(round as u64), length + 13));
        check(a.pool(), &sequence, &all[..length + 13]);
        append(a.pool(), &mut sequence, &all[..length + 20], 7);
        check(a.pool(), &sequence, &all[..length + 20]);
        // A copy, which is not taken, is closed with the stream.
        let copied = a.pool().replicate_to_node(&sequence, "b").await.unwrap();
        assert_eq!(copied.tokens, length + 20);
        drop(arrival(&mut to_b).await);
        drop(sequence);
    }
    for node in [&a, &b] {
        idle(node.pool()).await;
        assert!(node.shutdown(WAIT).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_blocks_move_and_come_back_in_all_groups() {
    let [(a, _), (b, _)] = pair([200, 200]).await;
    let all: Vec<u32> = (0..123).collect();
    drop(compute(a.pool(), 1, &all[..103]));
    let cached = a.pool().cached_blocks().len();
    let report = a.pool().offload_to_node("b", 200).await.unwrap();
    assert_eq!(report.evicted_blocks + report.leaving_blocks, cached, "{report:?}");
    idle(a.pool()).await;
    assert_eq!((hit(a.pool(), &all), hit(b.pool(), &all)), (0, 100));
    let back = a.pool().bring_back_from_node("b", &KEYS, &all).await.unwrap();
    let needed = b.pool().prompt_blocks(&KEYS, &all).unwrap().needed_blocks(100);
    assert_eq!((back.cached_blocks, back.carried.blocks), (25, needed), "{back:?}");
    assert_eq!(hit(a.pool(), &all), 100);
    // What the peer has evicted in one group is a shorter prefix, or none.
    a.pool().evict_cached(0);
    let window = b.pool().prompt_blocks(&KEYS, &all).unwrap().needed(100).last().unwrap().hash();
    b.pool().uncache(&[window]);
    let back = a.pool().bring_back_from_node("b", &KEYS, &all).await.unwrap();
    assert_eq!((back.cached_blocks, hit(a.pool(), &all), a.pool().cached_blocks().len()), (0, 0, 0));
    idle(a.pool()).await;
    idle(b.pool()).await;
}

/// An engine that takes sequences of one list gets none of several, and peers of other groups get
/// neither sequences nor blocks. The sequence comes back unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_other_side_cannot_take_stays() {
    let [(a, _to_a), (b, _to_b)] = pair([200, 200]).await;
    let all: Vec<u32> = (0..43).collect();
    let sequence = compute(a.pool(), 1, &all);
    let refused = a.pool().migrate_to_node(sequence, "b").await.unwrap_err();
    assert!(refused.to_string().contains("one list of blocks"), "{refused}");
    check(a.pool(), &refused.sequence, &all);
    // Of the same layout, but with other groups.
    let layout = a.pool().layout().clone();
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let other = Pool::builder(layout).blocks(100).prefix_cache(cache).build().unwrap();
    let (c, _to_c) = start("c", other, Some(&a)).await;
    while !a.peers().await.unwrap().contains(&("c".to_owned(), true)) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let refused = a.pool().migrate_to_node(*refused.sequence, "c").await.unwrap_err();
    assert!(refused.to_string().contains("lists of blocks"), "{refused}");
    let refused_blocks = a.pool().offload_to_node("c", 9).await.unwrap_err();
    assert!(
        matches!(&refused_blocks, TransferError::Node { reason, .. } if reason.contains("lists of blocks"))
    );
    let refused_blocks = c.pool().bring_back_from_node("a", &KEYS, &all).await.unwrap_err();
    assert!(refused_blocks.to_string().contains("lists of blocks"), "{refused_blocks}");
    let one: Sequence = c.pool().sequence(SequenceId(5)).tokens(&all).unwrap();
    let refused_one = c.pool().migrate_to_node(one, "a").await.unwrap_err();
    assert!(refused_one.to_string().contains("one list of blocks"), "{refused_one}");
    check(a.pool(), &refused.sequence, &all);
    drop((refused, refused_one));
    for node in [&a, &b, &c] {
        idle(node.pool()).await;
    }
}

/// A peer with a quota of fetched blocks sends them in several parts, and one whose memory lost a
/// block sends a shorter prefix.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_come_in_parts() {
    let local = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let builder = Node::builder(pool(400)).name("b").listen(local).fetch_blocks(20);
    let (b, _to_b) = builder.start().await.unwrap();
    let (a, _to_a) = start("a", pool(400), Some(&b)).await;
    while !a.peers().await.unwrap().contains(&("b".to_owned(), true)) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let all: Vec<u32> = (0..203).collect();
    drop(compute(b.pool(), 1, &all));
    let needed = b.pool().prompt_blocks(&KEYS, &all).unwrap().needed_blocks(200);
    let back = a.pool().bring_back_from_node("b", &KEYS, &all).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks, hit(a.pool(), &all)), (50, needed, 200), "{back:?}");
    idle(a.pool()).await;
    idle(b.pool()).await;
}

/// A node moves cached blocks of all groups, and the sequences that its engine offers, while few
/// blocks are free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_pool_offloads_and_offers() {
    struct Engine(std::sync::Mutex<Vec<GroupedSequence>>);
    impl Offers<GroupedSequence> for Engine {
        fn offer(&self, _: usize) -> Option<GroupedSequence> {
            self.0.lock().unwrap().pop()
        }
        fn release(&self, _: SequenceId) -> Option<GroupedSequence> {
            None
        }
        fn take_back(&self, sequence: GroupedSequence) {
            self.0.lock().unwrap().push(sequence);
        }
    }
    let (b, to_b) = start("b", pool(400), None).await;
    let mut to_b = to_b.grouped();
    let all: Vec<u32> = (0..103).collect();
    let here = pool(100);
    let engine = Arc::new(Engine(vec![compute(&here, 1, &all[..60])].into()));
    drop(compute(&here, 2, &all));
    let peer = PeerSettings::new("b", b.addresses()[0].clone());
    let builder = Node::builder(here.clone()).name("a").peers(vec![peer]).offers(engine.clone());
    let offload = OffloadBelow { below: 100, to: "b".into() };
    let (a, _to_a) = builder.offload(offload).start().await.unwrap();
    let sequence = arrival(&mut to_b).await;
    check(b.pool(), &sequence, &all[..60]);
    drop(sequence);
    let gone = async {
        while a.pool().free_blocks() < 100 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, gone).await.expect("all blocks are at the peer");
    assert_eq!((hit(a.pool(), &all), hit(b.pool(), &all)), (0, 100));
    assert!(a.shutdown(WAIT).await);
    idle(b.pool()).await;
}
