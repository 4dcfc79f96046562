//! A pin that ends with its scope.

use crate::block::KeepAlive;
use crate::error::HandleError;
use crate::ids::BlockHandle;
use crate::sync::Arc;

use super::Pool;

/// Keeps a block where it is until it is dropped, or the block has lost its last owner: it is neither evicted nor moved.
/// It holds no reference: a cached block without an owner can be evicted, and a later hit is not pinned.
///
/// It pins a block of a lease or of a sequence as well as one of handles, and nobody but itself takes its pin off those. An
/// engine that [unpins](Pool::unpin) its own blocks by handle counts the pins on them itself.
#[must_use = "dropping it unpins the block"]
pub struct BlockPin {
    keep_alive: Arc<KeepAlive>,
    handle: BlockHandle,
}

impl Pool {
    /// Pins a block of any owner for as long as the result lives: for a transfer, whose address must not change.
    ///
    /// ```
    /// # use kvpool::{pool::{AllocRequest, Pool}, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(10).build()?;
    /// let lease = pool.allocate(AllocRequest::new(1))?;
    /// let handle = lease.handles().next().expect("one block");
    /// let pin = pool.pin_scoped(handle)?;
    /// assert_eq!(pool.info(handle)?.pins, 1);
    /// drop(pin);
    /// assert_eq!(pool.info(handle)?.pins, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`HandleError`]; nothing was changed.
    pub fn pin_scoped(&self, handle: BlockHandle) -> Result<BlockPin, HandleError> {
        let keep_alive = self.0.blocks.keep_alive();
        self.0.blocks.pin_any(handle)?;
        Ok(BlockPin { keep_alive, handle })
    }
}

impl BlockPin {
    /// The block that is pinned.
    pub fn handle(&self) -> BlockHandle {
        self.handle
    }
}

impl Drop for BlockPin {
    fn drop(&mut self) {
        // Of this generation of the block: a free block has no pins, and its next owner's are not ours.
        self.keep_alive.blocks().unpin_any(self.handle);
    }
}

impl std::fmt::Debug for BlockPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BlockPin").field(&self.handle).finish()
    }
}
