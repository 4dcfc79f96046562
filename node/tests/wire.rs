//! The decoders take any bytes.

mod decoders;
#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use decoders::decode_all;
use kvpool::prefix::{BlockHash, Origin};
use kvpool::transfer::Manifest;
use kvpool::transport::Tag;
use kvpool::{FrameId, Run};
use kvpool_node::protocol::{CacheAnswer, CacheQuestion, List};
use kvpool_node::tier::{Fingerprint, TierKey, TierValue, origins_of};
use kvpool_node::wire::{
    self, Ack, Form, FrameHead, FrameKind, Header, Hello, ItemHead, ItemStatus, Role, Statement, StreamHead,
    StreamPlace, WIRE_VERSION, Welcome,
};

/// Returns the manifest of a sequence, or of cached blocks, with origins that are always the same.
fn manifest(is_sequence: bool) -> Manifest {
    let pool = kv::pool(kv::plain(), 20);
    let sequence = kv::admit(&pool, 7, &kv::prompt(1, 10)).unwrap();
    let export = if is_sequence {
        pool.export(sequence).unwrap()
    } else {
        drop(sequence);
        pool.export_cached(2).unwrap()
    };
    let mut json = serde_json::to_value(export.manifest().unwrap()).unwrap();
    let place = if is_sequence { "/contents/Sequence/lists/0/known" } else { "/contents/Cached/blocks/0" };
    let origins = json.pointer_mut(&format!("{place}/origins")).expect("a manifest has origins");
    assert_eq!(origins.as_array().map(Vec::len), Some(1));
    *origins = serde_json::json!([{ "cache": 7, "era": 0 }, { "cache": u64::MAX - 1, "era": 1u64 << 40 }]);
    if !is_sequence {
        json["contents"]["Cached"]["blocks"][1]["origins"] = serde_json::json!([]);
    }
    let manifest: Manifest = serde_json::from_value(json).unwrap();
    manifest.check().unwrap();
    manifest
}

/// Returns a value of a tier.
fn tier_value() -> Vec<u8> {
    let key = TierKey { fingerprint: Fingerprint::from_bytes([3; 16]), hash: BlockHash::new(1 << 100, 2) };
    let origins = [Origin { cache: 7, era: 1 }, Origin { cache: 9, era: u64::MAX >> 1 }];
    let fill = |block: &mut [u8]| {
        block.fill(5);
        Ok::<_, ()>(())
    };
    TierValue::new(key, &origins, 100, fill).unwrap().bytes().into()
}

/// Valid bytes of every kind; also the seeds of the fuzz target.
fn valid() -> Vec<(&'static str, Vec<u8>)> {
    let header = Header {
        version: WIRE_VERSION,
        role: Role::Control,
        has_token: true,
        incarnation: 7,
        nonce: [9; 32],
    };
    let run = Run { start: FrameId(5), len: 3 };
    let item = ItemHead { item: 1, tag: Tag(9), run, form: Form::Planes, bytes: 4096 };
    let ack = Ack { item: 77, status: ItemStatus::Overlap };
    let statement = Statement { began_ms: 1 << 40, lock: Some([7; 16]), message_bytes: 4 << 20 };
    let hello =
        |place| Hello { name: "gpu-node-2".into(), messages: 1, fingerprint: [3; 16], statement, place };
    let welcome = Welcome::Accepted {
        name: "gpu-node-1".into(),
        messages: 1,
        fingerprint: [3; 16],
        statement,
        link: 5,
        streams: 4,
    };
    let frame = |message: Vec<u8>| {
        let head = FrameHead { kind: FrameKind::Message, length: message.len() };
        [&head.encode()[..], &message].concat()
    };
    let message = |hello: &Hello| frame(wire::encode(hello, 1 << 16).unwrap());
    let hashes = List::new(vec![BlockHash::new(1 << 100, 2), BlockHash::new(3, u64::MAX)]).unwrap();
    let question = CacheQuestion { number: 1 << 40, hashes };
    let answer = CacheAnswer::new(1 << 40, &[true; 11]);
    vec![
        ("header", header.encode().into()),
        ("item", StreamHead::Item(item).encode().into()),
        ("ack", StreamHead::Ack(ack).encode().into()),
        ("hello_control", message(&hello(StreamPlace::Control { streams: 4 }))),
        ("hello_data", message(&hello(StreamPlace::Data { link: 1 << 100, index: 3 }))),
        ("welcome", frame(wire::encode(&welcome, 1 << 16).unwrap())),
        ("cache_question", frame(wire::encode(&question, 1 << 16).unwrap())),
        ("cache_answer", frame(wire::encode(&answer, 1 << 16).unwrap())),
        ("heartbeat", FrameHead { kind: FrameKind::Heartbeat, length: 0 }.encode().into()),
    ]
}

/// Valid manifests and a value of a tier, which are long.
fn long() -> Vec<Vec<u8>> {
    let manifest = |is_sequence| wire::encode(&manifest(is_sequence), 1 << 16).unwrap();
    vec![manifest(true), manifest(false), tier_value()]
}

#[test]
fn manifests_and_values_survive_a_round_trip() {
    let long = long();
    for (is_sequence, bytes) in [true, false].into_iter().zip(&long) {
        assert_eq!(wire::decode::<Manifest>(bytes), Ok(manifest(is_sequence)));
    }
    let origins = origins_of(&long[2]);
    assert_eq!(origins, [Origin { cache: 7, era: 1 }, Origin { cache: 9, era: u64::MAX >> 1 }]);
    long.iter().for_each(|bytes| decode_all(bytes));
}

#[test]
fn random_bytes_and_near_misses_are_decoded_or_refused() {
    let mut random = fastrand::Rng::with_seed(11);
    let mut valid: Vec<_> = valid().into_iter().map(|(_, bytes)| bytes).collect();
    valid.extend(long());
    for round in 0..200_000 {
        let mut bytes = if round % 4 == 0 {
            let mut noise = vec![0; random.usize(..100)];
            random.fill(&mut noise);
            noise
        } else {
            valid[random.usize(..valid.len())].clone()
        };
        for _ in 0..random.usize(..3) {
            if !bytes.is_empty() {
                let at = random.usize(..bytes.len());
                bytes[at] = if random.bool() { random.u8(..) } else { bytes[at] ^ 1 << random.u8(..8) };
            }
        }
        if random.u8(..) < 64 {
            bytes.truncate(random.usize(..=bytes.len()));
        }
        decode_all(&bytes);
    }
}

/// The seeds are what this version encodes, so that the fuzz target begins behind the first checks.
///
/// After a change of the encoding, run with `KVPOOL_WRITE_SEEDS=1`.
#[test]
fn the_seeds_are_current() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/node_wire");
    for (name, bytes) in valid() {
        let path = format!("{folder}/{name}");
        if std::env::var_os("KVPOOL_WRITE_SEEDS").is_some() {
            std::fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{path}");
        decode_all(&bytes);
    }
}
