//! Small pools with a prefix cache, and prompts for them.

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{Pool, Sequence, SequenceId};

/// Tokens per block of the layout "tiny".
pub const BLOCK_TOKENS: usize = 4;

/// Creates a pool of small blocks for one thread, with an LRU cache.
///
/// # Panics
/// If it cannot be built.
pub fn pool(blocks: usize) -> Pool {
    pool_of(blocks, PrefixConfig::new())
}

/// Creates a pool of small blocks for one thread, with this cache.
///
/// # Panics
/// If it cannot be built.
pub fn pool_of(blocks: usize, config: PrefixConfig) -> Pool {
    let layout = KvLayout::named("tiny").expect("a known name");
    assert_eq!(layout.block_tokens(), BLOCK_TOKENS);
    let builder = Pool::builder(layout).blocks(blocks).magazine_blocks(4).threads(1);
    builder.prefix_cache(config).build().expect("a small pool")
}

/// Returns a prompt that shares its beginning with every prompt of the same number, and with no
/// other.
pub fn prompt(number: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| number * 100_000 + token).collect()
}

/// Opens a prompt and appends the part that was not cached; returns the number of cached tokens.
///
/// # Panics
/// If there is no room.
pub fn admit(pool: &Pool, id: u64, prompt: &[u32]) -> (Sequence, usize) {
    let mut sequence = pool.sequence(SequenceId(id)).tokens(prompt).expect("room for the prompt");
    let cached = sequence.len();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, prompt.len() - cached).expect("room for the prompt");
    batch.finish();
    (sequence, cached)
}
