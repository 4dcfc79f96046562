//! What holds for the decoders of a connection and any bytes; used by a test and a fuzz target.

use kvpool::prefix::{BlockHash, ORIGINS_MAX};
use kvpool::transfer::Manifest;
use kvpool_node::protocol::{CacheAnswer, CacheQuestion, QUESTION_MAX};
use kvpool_node::tier::{Fingerprint, HEADER_BYTES, TierKey, origins_of, verify};
use kvpool_node::wire::{
    self, Denial, FRAME_HEAD, FrameHead, HEADER, Header, Hello, ITEM_HEAD, StreamHead, Verdict, Welcome,
};

/// Bound of the messages that are decoded here.
const MESSAGE_BYTES: usize = 1 << 16;

/// Decodes the bytes as everything that a connection carries.
///
/// Fixed parts that are accepted must be encoded to the same bytes: no byte is ignored, but for the
/// spare fields of a header that states versions. Messages must be bounded, and survive encoding.
pub fn decode_all(bytes: &[u8]) {
    if let Some(first) = bytes.first_chunk::<HEADER>()
        && let Ok(header) = Header::decode(first)
    {
        let mut read = *first;
        if header.stated().is_some() {
            read[12..16].fill(0);
            read[56..].fill(0);
        }
        assert_eq!(header.encode(), read);
    }
    if let Some(first) = bytes.first_chunk::<ITEM_HEAD>()
        && let Ok(head) = StreamHead::decode(first)
    {
        assert_eq!(head.encode(), *first);
        if let StreamHead::Item(head) = head {
            assert!(head.run.len > 0 && head.run.end() > head.run.start.0);
        }
    }
    if let Some(&first) = bytes.first()
        && let Ok(verdict) = Verdict::decode(first)
    {
        assert_eq!(verdict as u8, first);
    }
    decode_value(bytes);
    let Some((first, rest)) = bytes.split_first_chunk::<FRAME_HEAD>() else { return };
    if let Ok(head) = FrameHead::decode(first, MESSAGE_BYTES) {
        assert_eq!(head.encode(), *first);
        assert!(head.length <= MESSAGE_BYTES);
    }
    for message in [bytes, rest] {
        if let Ok(hello) = wire::decode::<Hello>(message) {
            let encoded = wire::encode(&hello, usize::MAX).expect("it was decoded");
            assert!(encoded.len() <= message.len(), "postcard's encoding is the shortest");
            assert_eq!(wire::decode::<Hello>(&encoded), Ok(hello.clone()));
            if hello.check().is_ok() {
                assert!((1..=wire::NAME_MAX).contains(&hello.name.len()));
            }
        }
        // A reason of a later release is never sent.
        if let Ok(welcome) = wire::decode::<Welcome>(message)
            && !matches!(welcome, Welcome::Denied(Denial::Unknown(_)))
        {
            let encoded = wire::encode(&welcome, usize::MAX).expect("it was decoded");
            assert_eq!(wire::decode::<Welcome>(&encoded), Ok(welcome));
        }
        if let Ok(manifest) = wire::decode::<Manifest>(message) {
            let encoded = wire::encode(&manifest, usize::MAX).expect("it was decoded");
            assert!(encoded.len() <= message.len(), "postcard's encoding is the shortest");
            // Nothing is allocated for a manifest that contradicts itself.
            if manifest.check().is_ok() {
                assert_eq!(manifest.checksums().len(), manifest.blocks());
            }
            assert_eq!(wire::decode::<Manifest>(&encoded), Ok(manifest));
        }
        if let Ok(question) = wire::decode::<CacheQuestion>(message) {
            assert!(question.hashes.len() <= QUESTION_MAX);
            let encoded = wire::encode(&question, usize::MAX).expect("it was decoded");
            assert!(encoded.len() <= message.len(), "postcard's encoding is the shortest");
            assert_eq!(wire::decode::<CacheQuestion>(&encoded), Ok(question));
        }
        if let Ok(answer) = wire::decode::<CacheAnswer>(message) {
            let encoded = wire::encode(&answer, usize::MAX).expect("it was decoded");
            assert!(encoded.len() <= message.len(), "postcard's encoding is the shortest");
            // What it says is what an encoder would say.
            let cached = (0..=QUESTION_MAX).find_map(|hashes| Some((hashes, answer.cached(hashes)?)));
            if let Some((hashes, cached)) = cached {
                assert_eq!(CacheAnswer::new(answer.number, &cached).cached(hashes), Some(cached));
            }
            assert_eq!(wire::decode::<CacheAnswer>(&encoded), Ok(answer));
        }
    }
}

/// Verifies the bytes as a value of a tier, under the key that its header names.
fn decode_value(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return };
    let fingerprint = Fingerprint::from_bytes(*header[8..].first_chunk().expect("of the header"));
    let hash = BlockHash::from_bytes(*header[24..].first_chunk().expect("of the header"));
    let key = TierKey { fingerprint, hash };
    let length = u64::from_le_bytes(*header[48..].first_chunk().expect("of the header"));
    let Some(length) = usize::try_from(length).ok().filter(|&length| length <= bytes.len()) else { return };
    if let Ok(block) = verify(&key, length, bytes) {
        assert_eq!(block.len(), length);
        assert!(origins_of(bytes).len() <= ORIGINS_MAX);
    }
}
