//! Doors for the models, which play what sequences do with a block without their lists.

use crate::ids::{BlockId, FrameId, Run, SequenceId};

use crate::sync::Ordering::*;

use super::{AllocRequest, Blocks, Ownership};

/// A block for a list; `None` if there is none.
pub fn allocate_listed(blocks: &Blocks, request: &AllocRequest) -> Option<BlockId> {
    let mut taken = None;
    blocks.allocate_guarded(request, None, &mut |id| taken = Some(id)).ok().and(taken)
}

/// One reference less on each block of a list.
pub fn release_listed(blocks: &Blocks, ids: &[BlockId]) {
    blocks.release_listed(ids);
}

/// The next free of a block, which is free, is that with which the low bits of its generation go round.
pub fn before_the_turn(blocks: &Blocks, id: BlockId) {
    let word = blocks.word(id);
    assert!(word.is_available());
    blocks.space.table.word(id).store(word.before_the_turn().to_bits(), Release);
}

/// Seals a block of a list.
pub fn seal_guarded(blocks: &Blocks, id: BlockId) {
    blocks.seal_guarded(blocks.handle(id));
}

/// Makes a sealed block of a list writable again, if it can be.
pub fn reopen_guarded(blocks: &Blocks, id: BlockId) -> bool {
    blocks.reopen_guarded(id)
}

/// Evicts a block, uses its frame, and frees it; false if none could be evicted. What an allocation does when nothing is
/// free, without its search before.
pub fn evict(blocks: &Blocks, mut used: impl FnMut(FrameId)) -> bool {
    let evicted = blocks.evict_some(1, &mut |frame| {
        used(frame);
        blocks.space.free_run(Run { start: frame, len: 1 });
    });
    evicted > 0
}

/// The same, and takes the block at its frame into a list: all that an allocation does but the search.
pub fn replace(blocks: &Blocks) -> Option<BlockId> {
    let mut taken = None;
    let request = AllocRequest::new(1);
    let evicted = blocks.evict_some(1, &mut |frame| {
        taken =
            Some(blocks.own(frame, &request, SequenceId::NONE, blocks.clock().newest(), Ownership::Guarded));
    });
    if evicted > 0 { taken } else { None }
}
