//! Doors for the models, which play what sequences do with a block without their lists.

use crate::ids::BlockId;

use super::{AllocRequest, Blocks};

/// A block for a list; `None` if there is none.
pub fn allocate_listed(blocks: &Blocks, request: &AllocRequest) -> Option<BlockId> {
    let mut taken = None;
    blocks.allocate_listed(request, None, &mut |id| taken = Some(id)).ok().and(taken)
}

/// One reference less on each block of a list.
pub fn release_listed(blocks: &Blocks, ids: &[BlockId]) {
    blocks.release_listed(ids);
}
