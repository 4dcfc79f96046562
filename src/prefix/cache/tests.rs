use super::*;
use crate::block::{AllocRequest, Blocks, BlocksConfig};
use crate::ids::DeviceId;
use crate::prefix::HashKey;
use crate::sync::Arc;

fn hash(n: u64) -> BlockHash {
    BlockHash::new(u128::from(n) << 64 | u128::from(n) << 7 | 1, n + 100)
}

fn one_block() -> (Blocks, Arc<PrefixCache>) {
    let config = BlocksConfig {
        frames: 1,
        frames_max: 1,
        segment_frames: 64,
        magazine_blocks: 0,
        threads: 1,
        has_null_block: false,
        reserve: 0,
        run_frames: 0,
        device: DeviceId::Host,
    };
    let key = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let cache = Arc::new(PrefixCache::new(1, 1, 1, key).unwrap());
    (Blocks::with_evictor(config, None, Some(Box::new(cache.clone()))), cache)
}

fn refill(blocks: &Blocks, cache: &PrefixCache, n: u64) -> BlockId {
    let mut taken = None;
    blocks.allocate_listed(&AllocRequest::new(1), None, &mut |id| taken = Some(id)).unwrap();
    let id = taken.unwrap();
    cache.note(id, hash(n), cache.era(), 0, 0);
    cache.register(blocks, Since::Written(0), [(blocks.handle(id), None)]);
    blocks.release_listed(&[id]);
    id
}

/// The word recurs with other contents between a lookup's reads of the row and of the word.
#[test]
fn a_hit_is_not_of_another_turn_of_the_generation() {
    let (blocks, cache) = one_block();
    let (id, era) = (refill(&blocks, &cache, 1), cache.era());
    let word = blocks.word(id);
    assert!(word.is_evictable() && cache.row(id).holds(&hash(1), era));
    let before = blocks.handle(id).generation;
    while blocks.word(id) != word || blocks.handle(id).generation == before {
        refill(&blocks, &cache, 2);
    }
    assert_eq!(blocks.handle(id).generation.0, before.0 + (1 << BlockWord::GENERATION_BITS));
    assert_eq!(
        cache.hit(&blocks, (id, cache.row(id), blocks.cell(id)), word, &hash(1), era),
        None,
        "the block holds other tokens"
    );
    assert!(blocks.word(id).is_evictable(), "the reference was given back");
    assert_eq!((blocks.evictable(), blocks.audit().unwrap().owned), (1, 0));
    let found = cache.take(&blocks, hash(2), era).expect("the block is cached and found");
    assert_eq!((found, blocks.evictable()), (id, 0));
    blocks.release_listed(&[found]);
    blocks
        .allocate(&AllocRequest::new(1), &mut |id| blocks.release(&[id]))
        .expect("the block can be evicted");
}
