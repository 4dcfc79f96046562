//! Pools whose bytes identify them: a stored value depends on token, position, layer and half.

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{Arrangement, Dtype, Elements, ElementsMut, KvLayout, KvPlanes};
use kvpool::{Batch, Pool, PoolBuilder, Sequence, SequenceError, SequenceId};

pub const BLOCK_TOKENS: usize = 4;
const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const ROW: usize = HEADS * HEAD_DIM * 2;

pub fn layout(arrangement: Arrangement, parts: KvPlanes) -> KvLayout {
    sized(BLOCK_TOKENS, arrangement, parts)
}

/// Returns a layout with blocks of this many tokens.
pub fn sized(block_tokens: usize, arrangement: Arrangement, parts: KvPlanes) -> KvLayout {
    let layout = KvLayout::builder().layers(LAYERS).kv_heads(HEADS).head_dim(HEAD_DIM);
    let layout = layout.block_tokens(block_tokens).dtype(Dtype::Bf16);
    layout.arrangement(arrangement).parts(parts).build().unwrap()
}

pub fn plain() -> KvLayout {
    layout(Arrangement::LayerFirst, KvPlanes::Separate)
}

pub fn other() -> KvLayout {
    layout(Arrangement::BlockFirst, KvPlanes::Joined)
}

/// Caches with the same key find each other's blocks.
pub fn config() -> PrefixConfig {
    PrefixConfig::new().key(HashKey::from_bytes([7; 32]))
}

pub fn builder(layout: KvLayout, blocks: usize) -> PoolBuilder {
    Pool::builder(layout).blocks(blocks).magazine_blocks(4)
}

pub fn pool(layout: KvLayout, blocks: usize) -> Pool {
    builder(layout, blocks).prefix_cache(config()).build().unwrap()
}

/// Creates two pools of different arrangement.
pub fn pools(blocks: usize) -> (Pool, Pool) {
    (pool(plain(), blocks), pool(other(), blocks))
}

/// Returns a prompt with a unique beginning.
pub fn prompt(first: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| first * 100_000 + token).collect()
}

fn rows(tokens: &[u32], first: usize, layer: usize, half: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(tokens.len() * ROW);
    for (place, &token) in (first as u64..).zip(tokens) {
        let mut state = u64::from(token) << 32 ^ place << 8 ^ (layer as u64) << 1 ^ half;
        for _ in 0..ROW / 8 {
            // The steps of splitmix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            bytes.extend((mixed ^ mixed >> 31).to_le_bytes());
        }
    }
    bytes
}

/// Appends tokens and stores their bytes.
pub fn extend(batch: &mut Batch, sequence: &mut Sequence, tokens: &[u32]) -> Result<(), SequenceError> {
    let appended = batch.append(sequence, tokens.len())?.tokens;
    store(batch, sequence, appended.start, tokens);
    Ok(())
}

pub fn store(batch: &mut Batch, sequence: &mut Sequence, first: usize, tokens: &[u32]) {
    for layer in 0..LAYERS {
        let [k, v] = [0, 1].map(|half| rows(tokens, first, layer, half));
        let [k, v] = [&k, &v].map(|rows| Elements::new(Dtype::Bf16, rows).unwrap());
        batch.store(sequence, layer, first..first + tokens.len(), k, v).unwrap();
    }
}

/// Opens a prompt, and computes its uncached tokens.
pub fn admit(pool: &Pool, id: u64, tokens: &[u32]) -> Result<Sequence, SequenceError> {
    let mut sequence = pool.sequence(SequenceId(id)).tokens(tokens)?;
    let cached = sequence.len();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens[cached..])?;
    batch.finish();
    Ok(sequence)
}

/// Returns the number of cached full blocks of a prompt, without one that ends the prompt; checks
/// them.
pub fn cached(pool: &Pool, tokens: &[u32]) -> usize {
    let sequence = pool.sequence(SequenceId(u64::MAX)).tokens(tokens).unwrap();
    check(pool, &sequence, tokens);
    assert_eq!(sequence.len() % pool.layout().block_tokens(), 0);
    sequence.len() / pool.layout().block_tokens()
}

/// Checks the bytes of a sequence's tokens, which must begin with these.
pub fn check(pool: &Pool, sequence: &Sequence, tokens: &[u32]) {
    let length = sequence.len();
    let mut batch = pool.begin_batch();
    for layer in 0..LAYERS {
        let (mut k, mut v) = (vec![0; length * ROW], vec![0; length * ROW]);
        let [to_k, to_v] = [&mut k, &mut v].map(|rows| ElementsMut::new(Dtype::Bf16, rows).unwrap());
        batch.load(sequence, layer, 0..length, to_k, to_v).unwrap();
        for (half, got) in [(0, k), (1, v)] {
            assert!(got == rows(&tokens[..length], 0, layer, half), "{sequence:?}, layer {layer}");
        }
    }
}

/// Checks that no block is owned, and that all can be allocated.
pub fn is_idle(pool: &Pool) {
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, pool.sequence_count()), (0, 0, 0), "{report:?}");
    assert_eq!(pool.available_blocks(), pool.total_blocks());
}
