use std::time::{SystemTime, UNIX_EPOCH};

use kvpool::prefix::BlockHash;
use kvpool::{CacheGroup, GroupKeeps};
use serde::{Serialize, Serializer};

use super::changes::{Change, StoredBlock};
use super::settings::HashForm;

#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) hashes: HashForm,
    pub(super) medium: String,
    pub(super) rank: u32,
    pub(super) groups: Box<[CacheGroup]>,
}

/// An event of vLLM. Keys without a default there are written even if they are nil.
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
        /// Each block's keys, or nil; omitted if no block has any.
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<Vec<WireKey<'a>>>>>,
        group_idx: u32,
        kv_cache_spec_kind: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        kv_cache_spec_sliding_window: Option<usize>,
    },
    BlockRemoved {
        block_hashes: Vec<WireHash>,
        medium: &'a str,
        group_idx: u32,
    },
    AllBlocksCleared {},
}

enum WireHash {
    Integer(u64),
    Bytes([u8; BlockHash::BYTES]),
}

/// A key, and the position of its first token in the block: negative if it is in an earlier block.
type WireKey<'a> = (WireBytes<'a>, i64);

/// Text, as vLLM's identifiers of images are, or other bytes.
struct WireBytes<'a>(&'a [u8]);

impl Serialize for WireBytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.serialize_bytes(self.0),
        }
    }
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
    /// Writes a batch with the current time.
    pub(super) fn write(&self, changes: &[Change]) -> Vec<u8> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let events: Vec<_> = changes.iter().map(|change| self.event(change)).collect();
        rmp_serde::to_vec_named(&(now.as_secs_f64(), events, self.rank)).expect("memory takes every value")
    }

    fn event<'a>(&'a self, change: &'a Change) -> Event<'a> {
        let hash = |hash: BlockHash| self.hash(hash);
        let medium = self.medium.as_str();
        match change {
            Change::Stored(chain) => {
                let group = chain.first().map_or(0, |block: &StoredBlock| block.group);
                let (kind, window) = self.kind(group);
                Event::BlockStored {
                    block_hashes: chain.iter().map(|block| hash(block.hash)).collect(),
                    parent_block_hash: chain.first().and_then(|block| block.parent).map(hash),
                    token_ids: chain.iter().flat_map(|block| block.tokens.iter().copied()).collect(),
                    block_size: chain.first().map_or(0, |block| block.block_tokens),
                    lora_id: None,
                    medium,
                    lora_name: None,
                    extra_keys: extra_keys(chain),
                    group_idx: group,
                    kv_cache_spec_kind: kind,
                    kv_cache_spec_sliding_window: window,
                }
            }
            Change::Removed(group, hashes) => Event::BlockRemoved {
                block_hashes: hashes.iter().copied().map(hash).collect(),
                medium,
                group_idx: *group,
            },
            Change::Cleared => Event::AllBlocksCleared {},
        }
    }

    /// Returns the name that vLLM has for what a group keeps, and its window.
    fn kind(&self, group: u32) -> (&'static str, Option<usize>) {
        match self.groups.get(group as usize).map(|group| group.keeps) {
            Some(GroupKeeps::Window(window)) => ("sliding_window", Some(window.tokens())),
            Some(GroupKeeps::State) => ("mamba", None),
            _ => ("full_attention", None),
        }
    }

    fn hash(&self, hash: BlockHash) -> WireHash {
        match self.hashes {
            HashForm::Integer => WireHash::Integer(hash.words()[0]),
            HashForm::Bytes => WireHash::Bytes(hash.to_bytes()),
        }
    }
}

fn extra_keys(chain: &[StoredBlock]) -> Option<Vec<Option<Vec<WireKey<'_>>>>> {
    let keys: Vec<_> = chain.iter().map(extra_keys_of).collect();
    keys.iter().any(Option::is_some).then_some(keys)
}

fn extra_keys_of(block: &StoredBlock) -> Option<Vec<WireKey<'_>>> {
    let keys = block.extra_keys.iter().map(|(offset, key)| (WireBytes(&key.key), *offset));
    (!block.extra_keys.is_empty()).then(|| keys.collect())
}

#[cfg(test)]
mod tests {
    use kvpool::prefix::ExtraKey;
    use kvpool::{KvLayout, Pool, Window};

    use super::*;

    /// Of a pool whose groups keep all tokens, a window, and a state.
    fn groups() -> Box<[CacheGroup]> {
        let layout = KvLayout::named("tiny").unwrap();
        let builder = Pool::builder(layout).blocks(100).without_storage();
        let builder = builder.groups([None, Some(Window::new(8).unwrap())]).states([2]);
        builder.build().unwrap().cache_groups().into()
    }

    #[test]
    fn groups_have_the_names_of_vllm() {
        let writer = Writer { hashes: HashForm::Integer, medium: "GPU".into(), rank: 0, groups: groups() };
        let expected = [("full_attention", None), ("sliding_window", Some(8)), ("mamba", None)];
        assert_eq!([0, 1, 2].map(|group| writer.kind(group)), expected);
        let (parent, tokens, extra_keys) = (None, Box::default(), Box::default());
        let hash = BlockHash::new(1, 9);
        let block = StoredBlock { hash, parent, tokens, block_tokens: 2, group: 1, extra_keys };
        let bytes = writer.write(&[Change::Stored(vec![block])]);
        let name = b"kv_cache_spec_sliding_window";
        let expected = [&[0xa0 | name.len() as u8], &name[..], &[8]].concat();
        assert!(bytes.windows(expected.len()).any(|window| window == expected), "{bytes:x?}");
    }

    /// The bytes after the time are those of vLLM.
    #[test]
    fn a_batch_is_what_vllm_writes() {
        let writer = Writer { hashes: HashForm::Integer, medium: "GPU".into(), rank: 0, groups: groups() };
        let block = |n: u128, parent, tokens: &[u32]| StoredBlock {
            hash: BlockHash::new(n, 9),
            parent,
            tokens: tokens.into(),
            block_tokens: 2,
            group: 0,
            extra_keys: Box::default(),
        };
        let first = block(1, None, &[5, 6]);
        let second = block(2, Some(first.hash), &[7, 300]);
        let removed = Change::Removed(0, vec![first.hash]);
        let bytes = writer.write(&[Change::Cleared, Change::Stored(vec![first, second]), removed]);
        assert_eq!((bytes[0], bytes[1]), (0x93, 0xcb), "an array of three, the first a float");
        let text = |text: &str| [&[0xa0 | text.len() as u8][..], text.as_bytes()].concat();
        let expected = [
            vec![0x93, 0x81],
            text("type"),
            text("AllBlocksCleared"),
            vec![0x8a],
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
            vec![0xc0],
            text("group_idx"),
            vec![0],
            text("kv_cache_spec_kind"),
            text("full_attention"),
            vec![0x84],
            text("type"),
            text("BlockRemoved"),
            text("block_hashes"),
            vec![0x91, 1],
            text("medium"),
            text("GPU"),
            text("group_idx"),
            vec![0, 0],
        ];
        assert_eq!(bytes[10..], expected.concat());
    }

    /// One entry per block, as in vLLM: identifier and position of an image.
    #[test]
    fn extra_keys_are_those_of_each_block() {
        let writer = Writer { hashes: HashForm::Integer, medium: "GPU".into(), rank: 0, groups: groups() };
        let block = |n: u128, keys: &[(i64, &[u8])]| StoredBlock {
            hash: BlockHash::new(n, 9),
            parent: None,
            tokens: Box::new([1, 2]),
            block_tokens: 2,
            group: 2,
            extra_keys: keys.iter().map(|&(at, key)| (at, ExtraKey::new(0..9, key))).collect(),
        };
        let plain = writer.write(&[Change::Stored(vec![block(1, &[])])]);
        let name = [&[0xa0 | 10][..], b"extra_keys"].concat();
        assert!(!plain.windows(name.len()).any(|window| window == name));
        let chain = vec![block(1, &[]), block(2, &[(1, b"im"), (-1, &[0xff])])];
        let bytes = writer.write(&[Change::Stored(chain)]);
        let expected =
            [&name[..], &[0x92, 0xc0, 0x92], &[0x92, 0xa2, b'i', b'm', 1], &[0x92, 0xc4, 1, 0xff, 0xff]];
        let expected = expected.concat();
        assert!(bytes.windows(expected.len()).any(|window| window == expected), "{bytes:x?}");
    }

    #[test]
    fn hashes_may_be_all_bytes() {
        let writer = Writer { hashes: HashForm::Bytes, medium: "CPU".into(), rank: 3, groups: groups() };
        let hash = BlockHash::new(u128::MAX - 5, 77);
        let bytes = writer.write(&[Change::Removed(1, vec![hash])]);
        let expected = [&[0x91, 0xc4, 24][..], &hash.to_bytes()].concat();
        assert!(bytes.windows(expected.len()).any(|window| window == expected), "{bytes:x?}");
        assert_eq!(bytes.last(), Some(&3));
    }
}
