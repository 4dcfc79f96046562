//! Two nodes of one process, linked over the loopback interface: whole sequences and cached blocks
//! go there and back, and nothing is lost when links, nodes and requests end in between.

#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool::prefix::PrefixKeys;
use kvpool::{AllocError, Pool, Sequence, SequenceError, SequenceId, TransferError};
use kvpool_node::transport::tcp::{Address, PeerSettings, Tls};
use kvpool_node::{Arrivals, Node, NodeError, Offers, OffloadBelow};

const WAIT: Duration = Duration::from_secs(20);

fn local() -> Address {
    Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

async fn linked(node: &Node, peer: &str, is_up: bool) {
    let changed = async {
        let wanted = (peer.to_owned(), is_up);
        while !node.peers().await.unwrap().contains(&wanted) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, changed).await.expect("a link");
}

/// Starts a node that others can reach.
async fn listening(name: &str, pool: Pool) -> (Node, Arrivals) {
    Node::builder(pool).name(name).listen(local()).start().await.unwrap()
}

fn peer_of(node: &Node) -> PeerSettings {
    PeerSettings::new(node.name(), node.addresses()[0].clone())
}

/// Two linked nodes whose pools have different arrangements.
async fn pair(blocks: [usize; 2]) -> [(Node, Arrivals); 2] {
    let b = listening("b", kv::pool(kv::other(), blocks[1])).await;
    let a = Node::builder(kv::pool(kv::plain(), blocks[0])).name("a").peers(vec![peer_of(&b.0)]);
    let a = a.start().await.unwrap();
    linked(&a.0, "b", true).await;
    [a, b]
}

async fn arrival(arrivals: &mut Arrivals) -> Sequence {
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
    kv::is_idle(pool);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_moves_and_continues_and_comes_back() {
    let [(a, mut to_a), (b, mut to_b)] = pair([100, 100]).await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    let report = a.pool().migrate_to_node(sequence, "b").await.unwrap();
    assert_eq!((report.tokens, report.carried.blocks), (42, 11));
    assert_eq!(a.pool().sequence_count(), 0);
    let mut sequence = arrival(&mut to_b).await;
    assert_eq!((sequence.id(), sequence.len()), (SequenceId(7), 42));
    kv::check(b.pool(), &sequence, &tokens);
    let more = kv::prompt(2, 9);
    let mut batch = b.pool().begin_batch();
    kv::extend(&mut batch, &mut sequence, &more).unwrap();
    batch.finish();
    let all = [tokens.clone(), more].concat();
    kv::check(b.pool(), &sequence, &all);
    // Its prefix can be found there; the source evicted nothing.
    assert_eq!(kv::cached(b.pool(), &[&tokens[..], &[0]].concat()), 10);
    assert_eq!(kv::cached(a.pool(), &[&tokens[..], &[0]].concat()), 10);
    // Back, where the first blocks are still cached.
    let mut moved = b.pool().migrate_to_node(sequence, "a").await;
    while let Err(failed) = moved {
        // Until the first source has forgotten.
        tokio::time::sleep(Duration::from_millis(5)).await;
        moved = b.pool().migrate_to_node(*failed.sequence, "a").await;
    }
    assert_eq!(moved.unwrap().shared_blocks, 10);
    let sequence = arrival(&mut to_a).await;
    kv::check(a.pool(), &sequence, &all);
    drop(sequence);
    idle(a.pool()).await;
    idle(b.pool()).await;
    assert_eq!((a.counters().sent, a.counters().received), (1, 1));
    assert!(a.shutdown(WAIT).await && b.shutdown(WAIT).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_leaves_the_sequence_where_it_is() {
    let [(a, _), (b, mut to_b)] = pair([100, 100]).await;
    let tokens = kv::prompt(1, 30);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    let report = a.pool().replicate_to_node(&sequence, "b").await.unwrap();
    assert_eq!((report.tokens, report.carried.blocks), (30, 8));
    let copy = arrival(&mut to_b).await;
    kv::check(a.pool(), &sequence, &tokens);
    kv::check(b.pool(), &copy, &tokens);
    // The id is open there.
    let again = a.pool().replicate_to_node(&sequence, "b").await.unwrap_err();
    assert!(again.to_string().contains("exists"), "{again}");
    drop((sequence, copy));
    idle(a.pool()).await;
    idle(b.pool()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_blocks_move_and_come_back() {
    let [(a, _), (b, _)] = pair([100, 100]).await;
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(a.pool(), 7, &tokens).unwrap());
    let report = a.pool().offload_to_node("b", 100).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks + report.leaving_blocks), (10, 10));
    assert_eq!((kv::cached(a.pool(), &tokens), kv::cached(b.pool(), &tokens)), (0, 10));
    let back = a.pool().bring_back_from_node("b", &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 10));
    assert_eq!((kv::cached(a.pool(), &tokens), kv::cached(b.pool(), &tokens)), (10, 10));
    idle(a.pool()).await;
    idle(b.pool()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_an_offload_as_much_moves_as_there_is_room_for() {
    let [(a, _), (b, _)] = pair([100, 10]).await;
    let held = kv::admit(b.pool(), 1, &kv::prompt(9, 24)).unwrap();
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(a.pool(), 7, &tokens).unwrap());
    let report = a.pool().offload_to_node("b", 100).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks + report.leaving_blocks), (4, 4));
    assert_eq!(kv::cached(a.pool(), &tokens), 6, "the end of the chain went");
    drop(held);
    idle(a.pool()).await;
    idle(b.pool()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_sequence_stays() {
    let [(a, _), (b, _to_b)] = pair([100, 4]).await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    let refused = a.pool().migrate_to_node(sequence, "b").await.unwrap_err();
    assert!(refused.to_string().contains("11 blocks are needed; 4 blocks are free there"), "{refused}");
    kv::check(a.pool(), &refused.sequence, &tokens);
    let unknown = a.pool().migrate_to_node(*refused.sequence, "c").await.unwrap_err();
    assert!(matches!(&unknown.error, TransferError::Node { node, .. } if node == "c"), "{unknown}");
    drop(unknown);
    idle(a.pool()).await;
    idle(b.pool()).await;
    assert_eq!(a.counters().refused, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_ends_and_starts_again_is_linked_again() {
    let (b, _to_b) = listening("b", kv::pool(kv::other(), 100)).await;
    let address = b.addresses()[0].clone();
    let (a, _to_a) =
        Node::builder(kv::pool(kv::plain(), 100)).name("a").peers(vec![peer_of(&b)]).start().await.unwrap();
    linked(&a, "b", true).await;
    assert!(b.shutdown(WAIT).await);
    linked(&a, "b", false).await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    let lost = a.pool().migrate_to_node(sequence, "b").await.unwrap_err();
    let again = async {
        loop {
            let node = Node::builder(kv::pool(kv::other(), 100)).name("b").listen(address.clone());
            if let Ok(started) = node.start().await {
                return started;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (b, mut to_b) = tokio::time::timeout(WAIT, again).await.expect("the address is free again");
    linked(&a, "b", true).await;
    a.pool().migrate_to_node(*lost.sequence, "b").await.unwrap();
    kv::check(b.pool(), &arrival(&mut to_b).await, &tokens);
}

/// Requests whose futures are dropped at any time lose no block on either side.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_requests_leak_nothing() {
    let [(a, _to_a), (b, to_b)] = pair([200, 200]).await;
    let arrived = Arc::new(Mutex::new(to_b));
    let mut rng = fastrand::Rng::with_seed(11);
    for id in 0..60 {
        // On a busy machine, blocks of dropped requests are on their way for longer.
        let admitted = async {
            loop {
                match kv::admit(a.pool(), id, &kv::prompt(id as u32 + 1, 120)) {
                    Err(SequenceError::Alloc(AllocError::Exhausted { in_transfer: 1.., .. })) => {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    admitted => return admitted.unwrap(),
                }
            }
        };
        let sequence = tokio::time::timeout(WAIT, admitted).await.expect("transfers end");
        let pool = a.pool().clone();
        let moving = tokio::spawn(async move { drop(pool.migrate_to_node(sequence, "b").await) });
        tokio::time::sleep(Duration::from_micros(rng.u64(0..4_000))).await;
        moving.abort();
        let _ = moving.await;
        while arrived.lock().unwrap().try_recv().is_some() {}
    }
    let over = async {
        while a.pool().sequence_count() + b.pool().sequence_count() > 0 {
            while arrived.lock().unwrap().try_recv().is_some() {}
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, over).await.expect("all ended");
    idle(a.pool()).await;
    idle(b.pool()).await;
}

/// Moves a sequence, again and again if links are lost, and returns it where it arrives.
async fn until_moved(from: &Pool, mut sequence: Sequence, to: &str, arrivals: &mut Arrivals) -> Sequence {
    let id = sequence.id();
    while let Err(failed) = from.migrate_to_node(sequence, to).await {
        sequence = *failed.sequence;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let arrived = arrival(arrivals).await;
    assert_eq!(arrived.id(), id);
    arrived
}

/// Links that are cut again and again, while sequences go back and forth: none is lost, none is
/// twice, and every byte is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_survive_lost_links() {
    let [(a, mut to_a), (b, mut to_b)] = pair([400, 400]).await;
    let (a, b) = (Arc::new(a), Arc::new(b));
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let cutter = {
        let (a, stop) = (a.clone(), stop.clone());
        tokio::spawn(async move {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(30)).await;
                a.cut_links("b").await.unwrap();
            }
        })
    };
    let prompts: Vec<Vec<u32>> = (0..8).map(|id| kv::prompt(id + 1, 100 + id as usize)).collect();
    let mut there: Vec<Sequence> = Vec::new();
    let mut here: Vec<Sequence> =
        (0..8).map(|id| kv::admit(a.pool(), id, &prompts[id as usize]).unwrap()).collect();
    for _round in 0..6 {
        for sequence in here.drain(..) {
            there.push(until_moved(a.pool(), sequence, "b", &mut to_b).await);
        }
        for sequence in there.drain(..) {
            here.push(until_moved(b.pool(), sequence, "a", &mut to_a).await);
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    cutter.await.unwrap();
    for sequence in &here {
        kv::check(a.pool(), sequence, &prompts[sequence.id().0 as usize]);
    }
    assert_eq!(here.len(), 8);
    drop(here);
    idle(a.pool()).await;
    idle(b.pool()).await;
    assert_eq!(a.counters().bad_blocks + b.counters().bad_blocks, 0);
}

/// An engine that gives away what it is asked for.
#[derive(Default)]
struct Engine(Mutex<Vec<Sequence>>);

impl Offers for Engine {
    fn offer(&self, _blocks: usize) -> Option<Sequence> {
        self.0.lock().unwrap().pop()
    }

    fn release(&self, id: SequenceId) -> Option<Sequence> {
        let mut sequences = self.0.lock().unwrap();
        let place = sequences.iter().position(|sequence| sequence.id() == id)?;
        Some(sequences.remove(place))
    }

    fn take_back(&self, sequence: Sequence) {
        self.0.lock().unwrap().push(sequence);
    }

    fn take_doubtful(&self, sequence: Sequence, _peer: &str) {
        self.take_back(sequence);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_move_by_themselves_when_few_are_free() {
    let (b, mut to_b) = listening("b", kv::pool(kv::other(), 400)).await;
    let engine = Arc::new(Engine::default());
    let (a, _to_a) = Node::builder(kv::pool(kv::plain(), 100))
        .name("a")
        .peers(vec![peer_of(&b)])
        .offers(engine.clone())
        .offload(OffloadBelow { below: 80, to: "b".into() })
        .start()
        .await
        .unwrap();
    linked(&a, "b", true).await;
    let (cached, running) = (kv::prompt(1, 81), kv::prompt(2, 120));
    drop(kv::admit(a.pool(), 1, &cached).unwrap());
    engine.take_back(kv::admit(a.pool(), 2, &running).unwrap());
    let sequence = arrival(&mut to_b).await;
    kv::check(b.pool(), &sequence, &running);
    assert_eq!(kv::cached(b.pool(), &cached), 20, "cached blocks went first");
    let free = async {
        while a.pool().free_blocks() < 80 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, free).await.expect("room");
}

/// A node that is dropped while a sequence moves by itself: the engine has it again, or the peer has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_moves_by_itself_outlives_the_node() {
    for round in 0..12 {
        let (b, mut to_b) = listening("b", kv::pool(kv::other(), 400)).await;
        let (engine, pool) = (Arc::new(Engine::default()), kv::pool(kv::plain(), 100));
        let builder = Node::builder(pool.clone()).name("a").peers(vec![peer_of(&b)]).offers(engine.clone());
        let (a, to_a) = builder.offload(OffloadBelow { below: 101, to: "b".into() }).start().await.unwrap();
        linked(&a, "b", true).await;
        engine.take_back(kv::admit(&pool, 2, &kv::prompt(2, 120)).unwrap());
        let is_here = || !engine.0.lock().unwrap().is_empty();
        while is_here() {
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(Duration::from_micros(200 * round)).await;
        drop((a, to_a));
        let has_owner = async {
            while !is_here() && to_b.try_recv().is_none() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, has_owner).await.expect("an owner");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_moves_only_what_exists_and_is_offered() {
    let (b, mut to_b) = listening("b", kv::pool(kv::other(), 100)).await;
    let engine = Arc::new(Engine::default());
    let builder = Node::builder(kv::pool(kv::plain(), 100)).name("a").offers(engine.clone());
    let (a, _to_a) = builder.peers(vec![peer_of(&b)]).start().await.unwrap();
    linked(&a, "b", true).await;
    engine.take_back(kv::admit(a.pool(), 2, &kv::prompt(1, 20)).unwrap());
    let unknown = a.migrate(SequenceId(2), "c").await.unwrap_err();
    assert!(matches!(unknown, NodeError::UnknownPeer { name } if name == "c"));
    let absent = a.migrate(SequenceId(3), "b").await.unwrap_err();
    assert!(matches!(absent, NodeError::NotOffered { id: SequenceId(3) }));
    a.migrate(SequenceId(2), "b").await.unwrap();
    assert_eq!(arrival(&mut to_b).await.id(), SequenceId(2));
    let record = &a.migrations().await.unwrap()[0];
    assert_eq!((record.sequence, record.blocks, record.peer.as_str()), (Some(2), 5, "b"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_gets_another_name_in_its_certificate() {
    let authority = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let root = params.self_signed(&authority).unwrap().pem();
    let issuer = rcgen::Issuer::new(params, authority);
    let tls = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let chain = params.signed_by(&key, &issuer).unwrap().pem();
        Tls::mutual(chain.as_bytes(), key.serialize_pem().as_bytes(), root.as_bytes()).unwrap()
    };
    let node = |name: &str| Node::builder(kv::pool(kv::plain(), 100)).name(name).tls(tls(name));
    let (b, _to_b) = node("b").listen(local()).start().await.unwrap();
    let mut peer = peer_of(&b);
    peer.server_name = Some("elsewhere".into());
    let (a, _to_a) = node("a").peers(vec![peer]).start().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(a.peers().await.unwrap().iter().all(|(_, is_up)| !is_up), "the certificate has another name");
    a.set_peers(vec![peer_of(&b)]);
    linked(&a, "b", true).await;
}

#[tokio::test]
async fn a_pool_without_storage_is_no_node() {
    let pool = Pool::builder(kv::plain()).blocks(10).without_storage().build().unwrap();
    assert!(matches!(
        Node::builder(pool).start().await,
        Err(NodeError::Pool(TransferError::NoStorage { .. }))
    ));
}
