//! Questions about the cache, and requests for cached blocks, of peers that do as they like.

use kvpool::TransferError;
use kvpool::prefix::BlockHash;
use kvpool_node::protocol::{
    AbortReason, Bytes, CacheAnswer, CacheQuestion, Envelope, Kind, List, ManifestBytes, Message,
    MigrationId, QUESTION_MAX, Refusal, ToSource, ToTarget,
};
use serde::Serialize;

use crate::kv;
use crate::support::*;

impl Peer {
    /// Waits until it is asked what it has cached.
    async fn question(&self) -> CacheQuestion {
        let question =
            |message| if let NodeMessage::AskCached(question) = message { Some(question) } else { None };
        self.wait_for(question).await
    }

    /// Asks what is cached, and waits for the answer.
    async fn cached(&self, hashes: &[BlockHash]) -> Vec<bool> {
        let question = CacheQuestion { number: 5, hashes: List::new(hashes.to_vec()).unwrap() };
        self.link.send(&NodeMessage::AskCached(question)).await.unwrap();
        let answer =
            |message| if let NodeMessage::TellCached(answer) = message { Some(answer) } else { None };
        self.wait_for(answer).await.cached(hashes.len()).expect("a bit for each hash")
    }

    async fn answer(&self, number: u64, cached: &[bool]) {
        self.link.send(&NodeMessage::TellCached(CacheAnswer::new(number, cached))).await.unwrap();
    }

    /// Asks for cached blocks. Returns the reason for which it gets none.
    async fn fetch(&self, id: u128, hashes: &[BlockHash]) -> Result<(), AbortReason> {
        let id = MigrationId(id);
        let what = Bytes::new(postcard::to_allocvec(&(0_u32, hashes)).unwrap()).unwrap();
        self.to_source(id, ToSource::Fetch { what }).await;
        self.wait_for(|message| match message {
            NodeMessage::Migration(Envelope { id: of, message: Message::ToTarget(message), .. })
                if of == id =>
            {
                match message {
                    ToTarget::Prepare { .. } => Some(Ok(())),
                    ToTarget::Abort { reason, .. } => Some(Err(reason)),
                    _ => None,
                }
            }
            _ => None,
        })
        .await
    }
}

fn hashes(count: u64) -> Vec<BlockHash> {
    (0..count).map(|number| BlockHash::new(number.into(), number)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_cannot_be() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    let b = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    let c = Peer::connect(&node, &Process::new("c", 1)).await.unwrap();
    linked(&node, "b", true).await;
    linked(&node, "c", true).await;
    let ask = || tokio::spawn(node.pool().remote("b").unwrap().cached(hashes(9)));
    // Of another peer, and to no question: ignored. Then the right one.
    let asked = ask();
    let CacheQuestion { number, hashes } = b.question().await;
    assert_eq!(hashes.len(), 9);
    c.answer(number, &[true; 9]).await;
    b.answer(number + 1, &[true; 9]).await;
    let cached = [true, false, false, false, false, false, false, false, true];
    b.answer(number, &cached).await;
    assert_eq!(soon("an answer", asked).await.unwrap().unwrap(), cached);
    // For other numbers of hashes.
    for wrong in [0, 8, 10, 17, QUESTION_MAX] {
        let asked = ask();
        let CacheQuestion { number, .. } = b.question().await;
        b.answer(number, &vec![true; wrong]).await;
        let failed = soon("a refusal", asked).await.unwrap().unwrap_err();
        assert!(failed.to_string().contains("not for 9 hashes"), "{wrong}: {failed}");
    }
    // None, and the link is lost.
    let asked = ask();
    b.question().await;
    drop(b);
    let failed = soon("a failure", asked).await.unwrap().unwrap_err();
    assert!(matches!(failed, TransferError::Node { .. }), "{failed}");
    assert_eq!(c.link.cause(), None);
}

/// A peer has two links. The one over which nothing was asked is lost: the answer comes over the
/// other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_is_lost_with_its_own_link_alone() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    let process = Process::new("b", 1);
    let older = Peer::connect(&node, &process).await.unwrap();
    linked(&node, "b", true).await;
    let newer = Peer::connect(&node, &process).await.unwrap();
    // Both were joined once each of them has answers.
    for link in [&older, &newer] {
        link.cached(&hashes(1)).await;
    }
    let asked = tokio::spawn(node.pool().remote("b").unwrap().cached(hashes(2)));
    let CacheQuestion { number, .. } = newer.question().await;
    older.link.close();
    soon("the end of the link", async { while older.link.recv::<NodeMessage>().await.is_ok() {} }).await;
    drop(older);
    // Behind the loss, of which the node hears meanwhile.
    tokio::time::sleep(QUIET).await;
    newer.answer(number, &[true, false]).await;
    assert_eq!(soon("an answer", asked).await.unwrap().unwrap(), [true, false]);
    // Its own link.
    let asked = tokio::spawn(node.pool().remote("b").unwrap().cached(hashes(2)));
    newer.question().await;
    drop(newer);
    let failed = soon("a failure", asked).await.unwrap().unwrap_err();
    assert!(failed.to_string().contains("the link was lost"), "{failed}");
}

/// Also in an executor without a timer, as an engine's thread may be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_without_an_answer_fails_in_the_end() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    linked(&node, "b", true).await;
    let remote = node.pool().remote("b").unwrap();
    let asked = std::thread::spawn(move || {
        let without_timer = tokio::runtime::Builder::new_current_thread().build().unwrap();
        without_timer.block_on(remote.cached(hashes(2)))
    });
    peer.question().await;
    let failed = tokio::task::spawn_blocking(|| asked.join().unwrap()).await.unwrap().unwrap_err();
    assert!(failed.to_string().contains("did not answer a question within 10 s"), "{failed}");
    // The link lives.
    assert_eq!(peer.cached(&hashes(1)).await, [false]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_is_too_long_costs_its_link() {
    /// A question without a bound, in the place of the right one.
    #[derive(Serialize)]
    #[allow(dead_code)]
    enum Unbounded {
        Migration,
        Reach,
        Over,
        IsOver,
        AskCached { number: u64, hashes: Vec<BlockHash> },
    }
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    let ask = |count: usize| Unbounded::AskCached { number: 5, hashes: hashes(count as u64) };
    peer.link.send(&ask(QUESTION_MAX)).await.unwrap();
    let answer = peer
        .wait_for(|message| if let NodeMessage::TellCached(answer) = message { Some(answer) } else { None });
    assert_eq!(answer.await.cached(QUESTION_MAX), Some(vec![false; QUESTION_MAX]));
    peer.link.send(&ask(QUESTION_MAX + 1)).await.unwrap();
    linked(&node, "b", false).await;
}

/// Blocks that a peer asked for, and does not take, are bounded for each peer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_a_peer_asked_for_have_a_quota() {
    let (node, _arrivals) = builder("a", kv::pool(kv::plain(), 50)).fetch_blocks(6).start().await.unwrap();
    drop(kv::admit(node.pool(), 7, &kv::prompt(1, 41)).unwrap());
    let some: Vec<_> = node.pool().cached_blocks().into_iter().map(|(_, hash)| hash).collect();
    assert_eq!(some.len(), 10);
    let owned = || 10 - node.pool().stats().evictable;
    let greedy = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    greedy.fetch(1, &some[..4]).await.unwrap();
    assert_eq!(owned(), 4);
    // It never takes them.
    let quota = |asked, under_way| AbortReason::Quota { asked, under_way, max: 6 };
    assert_eq!(greedy.fetch(2, &some[4..7]).await, Err(quota(3, 4)));
    // Blocks that are not here count no more once that is known; and one request alone is cut.
    let other = Peer::connect(&node, &Process::new("c", 1)).await.unwrap();
    other.fetch(5, &hashes(20)).await.unwrap();
    other.fetch(6, &some).await.unwrap();
    assert_eq!(owned(), 6);
    assert_eq!(other.fetch(7, &some[..1]).await, Err(quota(1, 6)));
    // What it gives up is there for its next request.
    let refused = ToSource::Refused { reason: Refusal::NotAsked, free: 0 };
    greedy.to_source(MigrationId(1), refused).await;
    greedy.fetch(8, &some[..6]).await.unwrap();
}

/// A migration ends while blocks are reserved for it: the peer is permitted nothing, of which it
/// would not hear. A transport that cannot take a permission back would keep the frames.
#[test]
fn a_migration_that_has_ended_permits_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let from = kv::pool(kv::plain(), 50);
        drop(kv::admit(&from, 7, &kv::prompt(1, 41)).unwrap());
        let some: Vec<_> = from.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
        let manifest = from.export_prefix(&some).unwrap().manifest().unwrap();
        let manifest = ManifestBytes::new(postcard::to_allocvec(&manifest).unwrap()).unwrap();
        let prepare = ToTarget::Prepare { kind: Kind::Cached, part: None, manifest };
        let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
        for (number, is_cut) in [(1, false), (2, true)] {
            let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
            linked(&node, "b", true).await;
            // The only thread that could reserve blocks waits.
            let (go_on, waits) = std::sync::mpsc::channel::<()>();
            let waiting = tokio::task::spawn_blocking(move || waits.recv());
            let id = MigrationId(number.into());
            let to_target = |message| peer.envelope(id, Message::ToTarget(message));
            peer.link.send(&to_target(prepare.clone())).await.unwrap();
            // Answered behind it.
            assert_eq!(peer.cached(&some[..1]).await, [false]);
            if is_cut {
                drop(peer);
                linked(&node, "b", false).await;
            } else {
                let reason = AbortReason::Cancelled;
                peer.link.send(&to_target(ToTarget::Abort { reservation: None, reason })).await.unwrap();
                assert_eq!(peer.cached(&some[..1]).await, [false]);
            }
            go_on.send(()).unwrap();
            waiting.await.unwrap().unwrap();
            until("its end", async || node.counters().failed == number).await;
            assert_eq!((node.counters().granted_bytes, node.pool().stats().free), (0, 50), "cut: {is_cut}");
        }
    });
}
