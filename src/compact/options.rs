use std::time::Duration;

use crate::config::FRAME_BITS;
use crate::ids::Order;

use super::{DefragError, FRAGMENTATION_PENALTY};

/// Default of [`DefragOptions::copy_deadline`].
pub const COPY_DEADLINE: Duration = Duration::from_secs(30);

/// Options of a compaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DefragOptions {
    /// Order of the free runs to gain; by default, the pool's.
    pub order: Option<Order>,
    /// Maximum number of bytes to move; by default, all moves that gain a run.
    pub budget_bytes: Option<u64>,
    /// Bytes copied per wave, at least one block; by default, the [storage's
    /// choice](crate::storage::Storage::wave_bytes). Free blocks of as many bytes are held
    /// meanwhile.
    pub wave_bytes: Option<usize>,
    /// Price of a broken run of a sequence, in joined free runs; 0 gains runs at any cost.
    pub fragmentation_penalty: u32,
    /// Time limit for the copy of a wave. Past it the run ends with [`DefragError::CopyOverdue`],
    /// and other runs can take their turn.
    pub copy_deadline: Duration,
}

impl Default for DefragOptions {
    fn default() -> Self {
        Self {
            order: None,
            budget_bytes: None,
            wave_bytes: None,
            fragmentation_penalty: FRAGMENTATION_PENALTY,
            copy_deadline: COPY_DEADLINE,
        }
    }
}

impl DefragOptions {
    /// Returns the defaults: the pool's order, no budget, the storage's wave size.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the order of the free runs to gain.
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// Sets the maximum number of bytes to move.
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Sets the number of bytes per wave.
    pub fn wave_bytes(mut self, bytes: usize) -> Self {
        self.wave_bytes = Some(bytes);
        self
    }

    /// Sets the price of a broken run of a sequence, in joined free runs.
    pub fn fragmentation_penalty(mut self, frames: u32) -> Self {
        self.fragmentation_penalty = frames;
        self
    }

    /// Sets the time limit for the copy of a wave.
    pub fn copy_deadline(mut self, deadline: Duration) -> Self {
        self.copy_deadline = deadline;
        self
    }

    pub(crate) fn check(&self) -> Result<(), DefragError> {
        if self.order.is_some_and(|order| u32::from(order.0) > FRAME_BITS) {
            return Err(DefragError::Option {
                option: "order",
                reason: "exceeds the order of the largest possible pool",
            });
        }
        if self.wave_bytes == Some(0) {
            return Err(DefragError::Option { option: "wave_bytes", reason: "must not be zero" });
        }
        if self.copy_deadline.is_zero() {
            return Err(DefragError::Option { option: "copy_deadline", reason: "must not be zero" });
        }
        Ok(())
    }
}
