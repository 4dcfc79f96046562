use crate::block::KeepAlive;
#[cfg(debug_assertions)]
use crate::block::{Noted, Site};
use crate::error::HandleError;
use crate::ids::BlockHandle;
use crate::sync::{Arc, call};

use super::Pool;

/// Pins a block until dropped, or until the block loses its last owner. No other call removes the
/// pin.
///
/// A pinned block is neither evicted nor moved. The pin holds no reference: a cached block without
/// an owner can be evicted, and a later hit on it is not pinned.
#[must_use = "dropping it unpins the block"]
pub struct BlockPin {
    keep_alive: Arc<KeepAlive>,
    handle: BlockHandle,
}

impl Pool {
    /// Pins a block of any owner until the result is dropped, for example during a transfer.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, Pool, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(10).build()?;
    /// let lease = pool.allocate(AllocRequest::new(1))?;
    /// let handle = lease.handles().next().expect("one block");
    /// let pin = pool.pin_scoped(handle)?;
    /// assert_eq!(pool.info(handle)?.pins, 1);
    /// drop(pin);
    /// assert_eq!(pool.info(handle)?.pins, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn pin_scoped(&self, handle: BlockHandle) -> Result<BlockPin, HandleError> {
        let _call = call();
        let keep_alive = self.0.blocks.keep_alive();
        self.0.blocks.pin(handle)?;
        #[cfg(debug_assertions)]
        self.0.blocks.note_sites(Noted::Pinned, [handle.id], Site::here());
        Ok(BlockPin { keep_alive, handle })
    }
}

impl BlockPin {
    /// Returns the pinned block.
    pub fn handle(&self) -> BlockHandle {
        self.handle
    }
}

impl Drop for BlockPin {
    fn drop(&mut self) {
        let _call = call();
        // Only in this generation of the block, whose next owner has pins of its own.
        self.keep_alive.blocks().unpin(self.handle);
    }
}

impl std::fmt::Debug for BlockPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BlockPin").field(&self.handle).finish()
    }
}
