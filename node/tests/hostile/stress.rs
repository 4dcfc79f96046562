//! A hostile peer beside honest ones: thousands of messages, well-formed and not, from a seed.
//!
//! `KVPOOL_HOSTILE_SEED` repeats a run, and `KVPOOL_HOSTILE_MESSAGES` sets its length.

use std::time::Duration;

use fastrand::Rng;
use kvpool::transfer::Manifest;
use kvpool::{Pool, Sequence};
use kvpool_node::protocol::{
    AbortReason, Attempt, Bytes, Envelope, Grant, Incarnation, Kind, List, Message, MigrationId, Part, Phase,
    Places, Range, Refusal, ReservationId, Text, Timing, ToSource, ToTarget,
};
use kvpool_node::transport::tcp::LinkError;
use kvpool_node::{Arrivals, Node};
use serde::ser::{Serialize, SerializeTuple, Serializer};

use crate::kv;
use crate::support::*;

/// Growth of the process that a run may cause: the queues of one link, and of the allocator.
const GROWTH_MAX: u64 = 256 << 20;

fn number_of(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Bytes of the process that are in memory.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Bytes that are sent as they are, in place of a message.
struct Noise(Vec<u8>);

impl Serialize for Noise {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(self.0.len())?;
        self.0.iter().try_for_each(|byte| tuple.serialize_element(byte))?;
        tuple.end()
    }
}

/// Invents messages.
struct Liar {
    rng: Rng,
    /// Manifests that were true once.
    manifests: Vec<Vec<u8>>,
    /// Reservations and migrations that were heard of.
    heard: Vec<(MigrationId, ReservationId)>,
}

impl Liar {
    fn id(&mut self) -> MigrationId {
        match self.rng.u8(..4) {
            0 if !self.heard.is_empty() => self.heard[self.rng.usize(..self.heard.len())].0,
            _ => MigrationId(self.rng.u128(..40)),
        }
    }

    fn reservation(&mut self) -> ReservationId {
        match self.rng.u8(..3) {
            0 if !self.heard.is_empty() => self.heard[self.rng.usize(..self.heard.len())].1,
            _ => ReservationId(self.rng.u64(..60)),
        }
    }

    fn places(&mut self) -> Places {
        let (mut ranges, mut start) = (Vec::new(), 0u32);
        for _ in 0..self.rng.usize(..4) {
            start = start.saturating_add(self.rng.u32(..20));
            let len = if self.rng.u8(..8) == 0 { u32::MAX - start } else { self.rng.u32(1..10) };
            ranges.push(Range { start, len });
            start = start.saturating_add(len);
        }
        Places::new(ranges).unwrap_or_default()
    }

    fn grant(&mut self) -> Grant {
        let range = |rng: &mut Rng| Range { start: rng.u32(..), len: rng.u32(..) };
        let runs = (0..self.rng.usize(..4)).map(|_| range(&mut self.rng)).collect();
        let (way, tag, region) = (self.rng.u8(..3), self.rng.u64(..40), self.rng.u32(..3));
        Grant { way, tag, region, runs: List::new(runs).unwrap() }
    }

    fn manifest(&mut self) -> Vec<u8> {
        let mut bytes = self.manifests[self.rng.usize(..self.manifests.len())].clone();
        if self.rng.bool() {
            for _ in 0..self.rng.usize(1..4) {
                let at = self.rng.usize(..bytes.len());
                bytes[at] = self.rng.u8(..);
            }
        }
        bytes
    }

    fn for_target(&mut self) -> ToTarget {
        let (reservation, attempt) = (self.reservation(), Attempt(self.rng.u8(..5)));
        match self.rng.u8(..10) {
            0..=3 => {
                let kind = [Kind::Migrate, Kind::Replicate, Kind::Cached, Kind::Fetch][self.rng.usize(..4)];
                let part = match self.rng.u8(..20) {
                    0 => Some(Part { index: 3, of: 2 }),
                    1..=3 => Some(Part { index: self.rng.u16(..3), of: self.rng.u16(..4) }),
                    _ => None,
                };
                ToTarget::Prepare { kind, part, manifest: Bytes::new(self.manifest()).unwrap() }
            }
            4 => ToTarget::Sent { reservation, attempt },
            5 => ToTarget::Commit { reservation, is_current: self.rng.bool() },
            6 => {
                let reservation = self.rng.bool().then_some(reservation);
                ToTarget::Abort { reservation, reason: AbortReason::Violation(Text::new("\u{1b}[2J\n")) }
            }
            7 => ToTarget::Query { reservation },
            8 => ToTarget::Heartbeat { reservation },
            _ => ToTarget::Forget { reservation },
        }
    }

    fn for_source(&mut self) -> ToSource {
        let (reservation, attempt) = (self.reservation(), Attempt(self.rng.u8(..5)));
        match self.rng.u8(..7) {
            0 => {
                let hashes: Vec<[u8; 16]> =
                    (0..self.rng.usize(..50)).map(|_| [self.rng.u8(..); 16]).collect();
                let what = postcard::to_allocvec(&(self.rng.u32(..), hashes)).unwrap();
                ToSource::Fetch { what: Bytes::new(what).unwrap() }
            }
            1 => {
                let (accepted, missing, grant) = (self.places(), self.places(), self.grant());
                ToSource::Prepared { reservation, accepted, missing, grant }
            }
            2 => ToSource::Refused {
                reason: Refusal::Full { needed: self.rng.u64(..) },
                free: self.rng.u64(..),
            },
            3 => ToSource::Verified { reservation, attempt, bad: self.places(), grant: self.grant() },
            4 => ToSource::Status { reservation, phase: Phase::Ready },
            5 => ToSource::Committed { reservation },
            _ => ToSource::Aborted { reservation, reason: AbortReason::Unknown },
        }
    }

    fn message(&mut self, peer: &Peer) -> NodeMessage {
        let way = if self.rng.bool() { Way::Tcp } else { Way::Nixl };
        let tag = self.rng.u64(..60);
        match self.rng.u8(..20) {
            0 => NodeMessage::Over { way, tag },
            1 => NodeMessage::IsOver { way, tag },
            2 => NodeMessage::Reach { way, metadata: Bytes::new(vec![7; self.rng.usize(..500)]).unwrap() },
            3 => {
                // Of another process, or for one.
                let message = Message::ToTarget(self.for_target());
                let (from, to) = (Incarnation(self.rng.u64(..3)), Incarnation(self.rng.u64(..3)));
                NodeMessage::Migration(Envelope { id: self.id(), from, to, message })
            }
            _ => {
                let id = self.id();
                let message = match self.rng.bool() {
                    true => Message::ToTarget(self.for_target()),
                    false => Message::ToSource(self.for_source()),
                };
                peer.envelope(id, message)
            }
        }
    }

    /// Remembers what a node says, as far as it has come.
    async fn listen(&mut self, peer: &Peer) {
        let soon = Duration::from_micros(50);
        while let Ok(Ok(message)) = tokio::time::timeout(soon, peer.link.recv::<NodeMessage>()).await {
            if let NodeMessage::Migration(Envelope { id, message: Message::ToSource(message), .. }) = message
                && let ToSource::Prepared { reservation, .. } | ToSource::Status { reservation, .. } = message
            {
                self.heard.push((id, reservation));
                if self.heard.len() > 50 {
                    self.heard.remove(0);
                }
            }
        }
    }

    /// Sends messages to a node under many names. Returns how often it was cut.
    async fn attack(&mut self, node: &Node, messages: u64) -> u64 {
        let (mut sent, mut cuts, mut incarnation) = (0, 0, 10);
        while sent < messages {
            incarnation += 1;
            let process = Process::new(&format!("h{}", self.rng.u8(..100)), incarnation);
            let Ok(peer) = Peer::connect(node, &process).await else { continue };
            for _ in 0..self.rng.usize(1..300) {
                sent += 1;
                let result = match self.rng.u8(..) {
                    0 => {
                        let noise: Vec<u8> = (0..self.rng.usize(1..200)).map(|_| self.rng.u8(..)).collect();
                        peer.link.send(&Noise(noise)).await
                    }
                    _ => peer.link.send(&self.message(&peer)).await,
                };
                if result.is_err() {
                    cuts += 1;
                    break;
                }
                self.listen(&peer).await;
            }
        }
        cuts
    }
}

fn manifests() -> Vec<Vec<u8>> {
    let pool = kv::pool(kv::plain(), 100);
    let sequence = kv::admit(&pool, 900, &kv::prompt(900, 42)).unwrap();
    let of_sequence: Manifest = pool.export_copy(&sequence).unwrap().manifest().unwrap();
    drop(sequence);
    let cached = pool.export_cached(6).unwrap();
    [of_sequence, cached.manifest().unwrap()].iter().map(|all| postcard::to_allocvec(all).unwrap()).collect()
}

/// Moves a sequence; waits where the former source has not heard yet that it arrived.
async fn carry(from: &Pool, mut sequence: Sequence, to: &str, arrivals: &mut Arrivals) -> Sequence {
    let id = sequence.id();
    loop {
        match from.migrate_to_node(sequence, to).await {
            Ok(_) => break,
            Err(failed) if failed.to_string().contains("does not know yet") => sequence = *failed.sequence,
            Err(failed) => panic!("an honest migration failed: {failed}"),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let arrived = soon("an arrival", arrivals.recv()).await.expect("a node that lives").sequence;
    assert_eq!(arrived.id(), id, "a sequence that no honest node sent");
    arrived
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_nodes_do_not_notice_a_hostile_peer() {
    let seed = number_of("KVPOOL_HOSTILE_SEED", 15);
    let messages = number_of("KVPOOL_HOSTILE_MESSAGES", 4_000);
    let timing = Timing { transfer_deadline_ms: 1_000, retry_ms: 100, limit_ms: 5_000 };
    let node = |name: &str, pool: Pool| builder(name, pool).timing(timing);
    let (a, mut to_a) = node("a", kv::pool(kv::plain(), 2_000)).start().await.unwrap();
    let peers = kvpool_node::transport::tcp::PeerSettings::new("a", a.addresses()[0].clone());
    let (b, mut to_b) = node("b", kv::pool(kv::other(), 2_000)).peers(vec![peers]).start().await.unwrap();
    linked(&a, "b", true).await;
    linked(&b, "a", true).await;
    let before = resident();
    let honest = async {
        let tokens = kv::prompt(1, 60);
        let mut sequence = kv::admit(a.pool(), 1, &tokens).unwrap();
        let mut rounds = 0;
        let began = std::time::Instant::now();
        while rounds < 60 || began.elapsed() < Duration::from_secs(3) {
            sequence = carry(a.pool(), sequence, "b", &mut to_b).await;
            kv::check(b.pool(), &sequence, &tokens);
            sequence = carry(b.pool(), sequence, "a", &mut to_a).await;
            kv::check(a.pool(), &sequence, &tokens);
            rounds += 1;
        }
        rounds
    };
    let liar = |seed| Liar { rng: Rng::with_seed(seed), manifests: manifests(), heard: Vec::new() };
    let (mut first, mut second) = (liar(seed), liar(seed + 1));
    let (rounds, cuts, more) =
        tokio::join!(honest, first.attack(&a, messages / 2), second.attack(&b, messages / 2));
    println!("seed {seed}: {rounds} honest rounds, {} cuts in {messages} messages", cuts + more);
    assert!(cuts + more > 0, "no malformed message was noticed");
    let growth = resident().saturating_sub(before);
    assert!(growth < GROWTH_MAX, "{growth} bytes more");
    // What was reserved for lies is free again, and nothing of the honest nodes is missing.
    for (node, arrivals) in [(&a, &mut to_a), (&b, &mut to_b)] {
        until("the end of all that was begun", async || {
            assert!(arrivals.try_recv().is_none(), "a lie arrived");
            node.pool().stats().used == 0 && node.quarantined_grants().await.unwrap() == 0
        })
        .await;
        kv::is_idle(node.pool());
        assert!(node.peers().await.unwrap().len() <= 65 + 1);
    }
    let again = Peer::connect(&a, &Process::new("late", 1)).await;
    assert!(!matches!(again, Err(LinkError::Slow { .. })), "a node that takes no links");
    assert!(a.shutdown(WAIT).await && b.shutdown(WAIT).await);
}
