//! Events name the group of layers: of a list, or behind all lists of a state, whose checkpoints name
//! the tokens before them.
#![cfg(not(any(kvpool_loom, miri)))]

use std::collections::HashMap;

use kvpool::prefix::{BlockHash, KvEvent, PrefixConfig};
use kvpool::{AdmitRequest, GroupKeeps, KvLayout, Pool, SequenceId, Tokens, Window};

const BLOCK_TOKENS: u32 = 4;

fn pool(tokens: [usize; 2]) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(BLOCK_TOKENS as usize);
    let builder = Pool::builder(layout.build().unwrap()).blocks(400).without_storage().threads(1);
    let builder = builder.groups([None, Some(Window::new(8).unwrap())]).list_tokens(tokens).states([3]);
    builder.prefix_cache(PrefixConfig::new()).build().unwrap()
}

/// A stored block.
struct Stored {
    group: u32,
    parent: Option<BlockHash>,
    tokens: Vec<u32>,
    block_tokens: u32,
}

#[test]
fn events_name_the_group_of_each_block() {
    let pool = pool([4, 8]);
    let groups = pool.cache_groups();
    let keeps: Vec<_> = groups.iter().map(|group| group.keeps).collect();
    assert_eq!(keeps, [GroupKeeps::All, GroupKeeps::Window(Window::new(8).unwrap()), GroupKeeps::State]);
    assert_eq!(groups.iter().map(|group| group.block_tokens).collect::<Vec<_>>(), [4, 8, 4]);
    // Before the subscription: its removal names the group all the same.
    let early: Vec<u32> = (500..532).collect();
    compute(&pool, 1, &early);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let all: Vec<u32> = (0..64).collect();
    compute(&pool, 2, &all);
    let mut stored = HashMap::new();
    let receive = |events: &mut kvpool::prefix::KvEvents, stored: &mut HashMap<_, _>| {
        let mut removed = [0; 3];
        while let Some(told) = events.try_recv() {
            match told.event {
                KvEvent::Stored { hash, parent, tokens, block_tokens, group, .. } => {
                    let tokens = tokens.to_vec();
                    let block = Stored { group, parent, tokens, block_tokens };
                    assert!(stored.insert(hash, block).is_none(), "twice");
                }
                KvEvent::Removed { hash, group, .. } => {
                    removed[group as usize] += 1;
                    if let Some(block) = stored.remove(&hash) {
                        assert_eq!(block.group, group);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        removed
    };
    receive(&mut events, &mut stored);
    let count = |group| stored.values().filter(|block: &&Stored| block.group == group).count();
    assert_eq!([count(0), count(1), count(2)], [16, 8, 3]);
    for (hash, block) in &stored {
        let first_group = block.parent.and_then(|parent| stored.get(&parent));
        match block.group {
            2 => {
                // Behind all 64 tokens.
                let parent = first_group.expect("a checkpoint names the tokens before it");
                assert_eq!((parent.group, &parent.tokens[..]), (0, &all[60..]), "{hash}");
                assert!(block.tokens.is_empty());
            }
            group => {
                assert_eq!(block.block_tokens as usize, block.tokens.len());
                assert_eq!(block.block_tokens, groups[group as usize].block_tokens);
                let before = block.tokens[0].checked_sub(1);
                assert_eq!(first_group.map(|parent| *parent.tokens.last().unwrap()), before, "{hash}");
                assert!(first_group.is_none_or(|parent| parent.group == group));
            }
        }
    }
    let listed = pool.cached_blocks_by_group();
    assert_eq!(listed.iter().map(Vec::len).sum::<usize>(), pool.cached_blocks().len());
    assert_eq!(listed.iter().map(Vec::len).collect::<Vec<_>>(), [16 + 8, 8 + 4, 3 + 3]);
    for (group, blocks) in listed.iter().enumerate() {
        let known = blocks.iter().filter_map(|(_, hash)| stored.get(hash));
        assert!(known.into_iter().all(|block| block.group as usize == group));
    }
    pool.evict_cached(0);
    assert_eq!(receive(&mut events, &mut stored), [24, 12, 6]);
    assert!(stored.is_empty());
    pool.audit().unwrap();
}

/// Computes a prompt, keeps a checkpoint behind it, and closes its sequence.
fn compute(pool: &Pool, id: u64, all: &[u32]) {
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), all)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(all.len())).unwrap();
    batch.checkpoint(&mut sequence).unwrap();
    batch.finish();
}
