//! Batches as MessagePack.

use std::time::{SystemTime, UNIX_EPOCH};

use kvpool::prefix::BlockHash;
use serde::{Serialize, Serializer};

use super::changes::{Change, StoredBlock};
use super::settings::HashForm;

/// How batches are written.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) hashes: HashForm,
    pub(super) medium: String,
    pub(super) rank: u32,
}

/// An event of vLLM. The keys without a default there are written, also if they are nil.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    BlockStored {
        block_hashes: Vec<WireHash>,
        parent_block_hash: Option<WireHash>,
        token_ids: Vec<u32>,
        block_size: u32,
        lora_id: Option<u32>,
        medium: &'a str,
        lora_name: Option<&'a str>,
    },
    BlockRemoved {
        block_hashes: Vec<WireHash>,
        medium: &'a str,
    },
    AllBlocksCleared {},
}

enum WireHash {
    Integer(u64),
    Bytes([u8; BlockHash::BYTES]),
}

impl Serialize for WireHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Integer(number) => serializer.serialize_u64(*number),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
        }
    }
}

impl Writer {
    /// Writes a batch, with the present time.
    pub(super) fn write(&self, changes: &[Change]) -> Vec<u8> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let events: Vec<_> = changes.iter().map(|change| self.event(change)).collect();
        rmp_serde::to_vec_named(&(now.as_secs_f64(), events, self.rank)).expect("memory takes every value")
    }

    fn event(&self, change: &Change) -> Event<'_> {
        let hash = |hash: BlockHash| self.hash(hash);
        let medium = self.medium.as_str();
        match change {
            Change::Stored(chain) => Event::BlockStored {
                block_hashes: chain.iter().map(|block| hash(block.hash)).collect(),
                parent_block_hash: chain.first().and_then(|block| block.parent).map(hash),
                token_ids: chain.iter().flat_map(|block| block.tokens.iter().copied()).collect(),
                block_size: chain.first().map_or(0, |block: &StoredBlock| block.block_tokens),
                lora_id: None,
                medium,
                lora_name: None,
            },
            Change::Removed(hashes) => {
                Event::BlockRemoved { block_hashes: hashes.iter().copied().map(hash).collect(), medium }
            }
            Change::Cleared => Event::AllBlocksCleared {},
        }
    }

    fn hash(&self, hash: BlockHash) -> WireHash {
        match self.hashes {
            HashForm::Integer => WireHash::Integer(hash.words()[0]),
            HashForm::Bytes => WireHash::Bytes(hash.to_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch as vLLM's decoder reads it, byte for byte behind the time.
    #[test]
    fn a_batch_is_what_vllm_writes() {
        let writer = Writer { hashes: HashForm::Integer, medium: "GPU".into(), rank: 0 };
        let block = |n: u128, parent, tokens: &[u32]| StoredBlock {
            hash: BlockHash::new(n, 9),
            parent,
            tokens: tokens.into(),
            block_tokens: 2,
        };
        let first = block(1, None, &[5, 6]);
        let second = block(2, Some(first.hash), &[7, 300]);
        let removed = Change::Removed(vec![first.hash]);
        let bytes = writer.write(&[Change::Cleared, Change::Stored(vec![first, second]), removed]);
        assert_eq!((bytes[0], bytes[1]), (0x93, 0xcb), "an array of three, the first a float");
        let text = |text: &str| [&[0xa0 | text.len() as u8][..], text.as_bytes()].concat();
        let expected = [
            vec![0x93, 0x81],
            text("type"),
            text("AllBlocksCleared"),
            vec![0x88],
            text("type"),
            text("BlockStored"),
            text("block_hashes"),
            vec![0x92, 1, 2],
            text("parent_block_hash"),
            vec![0xc0],
            text("token_ids"),
            vec![0x94, 5, 6, 7, 0xcd, 1, 44],
            text("block_size"),
            vec![2],
            text("lora_id"),
            vec![0xc0],
            text("medium"),
            text("GPU"),
            text("lora_name"),
            vec![0xc0, 0x83],
            text("type"),
            text("BlockRemoved"),
            text("block_hashes"),
            vec![0x91, 1],
            text("medium"),
            text("GPU"),
            vec![0],
        ];
        assert_eq!(bytes[10..], expected.concat());
    }

    #[test]
    fn hashes_may_be_all_bytes() {
        let writer = Writer { hashes: HashForm::Bytes, medium: "CPU".into(), rank: 3 };
        let hash = BlockHash::new(u128::MAX - 5, 77);
        let bytes = writer.write(&[Change::Removed(vec![hash])]);
        let expected = [&[0x91, 0xc4, 24][..], &hash.to_bytes()].concat();
        assert!(bytes.windows(expected.len()).any(|window| window == expected), "{bytes:x?}");
        assert_eq!(bytes.last(), Some(&3));
    }
}
