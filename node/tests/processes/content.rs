//! Which tokens a sequence has: its id says it, so that any process can check any sequence.

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{Pool, Sequence};

use crate::kv;

/// Returns the tokens of a sequence.
pub fn tokens(id: u64) -> Vec<u32> {
    kv::prompt((id % 40_000) as u32, 120 + (id * 37 % 120) as usize)
}

/// Returns the number of full blocks of a sequence.
pub fn full_blocks(id: u64) -> usize {
    tokens(id).len() / kv::BLOCK_TOKENS
}

/// Creates a pool whose prefix cache finds the blocks of the other nodes.
pub fn pool(layout: KvLayout, blocks: usize) -> Pool {
    let cache: PrefixConfig = kv::config();
    kv::builder(layout, blocks).prefix_cache(cache).build().unwrap()
}

/// Compares every byte of a sequence with what was written.
pub fn is_right(pool: &Pool, sequence: &Sequence) -> bool {
    let tokens = tokens(sequence.id().0);
    let check = || {
        assert_eq!(sequence.len(), tokens.len());
        kv::check(pool, sequence, &tokens);
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
}
