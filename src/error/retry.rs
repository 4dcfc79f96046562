//! Whether retrying a failed operation can succeed, and after what.

use super::{AllocError, SequenceError, StepError, TransferError};

/// What must happen before a failed operation can succeed: an estimate from the numbers in the
/// error. Other requests may take the blocks first, and the reserve is refilled first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Retry {
    /// Retrying cannot succeed: the call, the size of the pool, or a limit of a tenant must change.
    Never,
    /// Batches in flight, including the caller's, must end, which frees the missing blocks.
    AfterBatch,
    /// Transfers must end: this and the end of the batches free as many blocks as are missing.
    AfterTransfer,
    /// Owners must release blocks, moves must end, or waiting requests of higher priority must be
    /// served: [preempt](crate::Pool::victims) a sequence, or wait.
    AfterFree,
}

impl AllocError {
    /// Returns what must happen before the request can succeed.
    pub const fn retry(&self) -> Retry {
        match *self {
            Self::Exhausted { asked, free, retired, evictable, in_transfer, oldest_batch, .. } => {
                let after_batches = free + retired + evictable;
                if asked <= after_batches && oldest_batch.is_some() {
                    Retry::AfterBatch
                } else if in_transfer > 0 && asked <= after_batches + in_transfer {
                    Retry::AfterTransfer
                } else {
                    Retry::AfterFree
                }
            }
            Self::Deadline { asked, free, retired, oldest_batch: Some(_), head: None, turn: None }
                if asked <= free + retired =>
            {
                Retry::AfterBatch
            }
            Self::OverQuota { asked, quota, .. } if asked > quota => Retry::Never,
            Self::OverQuota { .. } => Retry::AfterFree,
            Self::Deadline { .. } | Self::NoRun { .. } | Self::Behind { .. } => Retry::AfterFree,
            Self::Zero
            | Self::TooLarge { .. }
            | Self::Reserved { .. }
            | Self::Floors { .. }
            | Self::FenceRefused { .. }
            | Self::DeviceLost { .. }
            | Self::WrongDevice { .. } => Retry::Never,
        }
    }

    /// Returns whether blocks that the request would keep may be what it lacks.
    pub(crate) const fn is_lack(&self) -> bool {
        matches!(
            self,
            Self::Exhausted { .. } | Self::NoRun { .. } | Self::OverQuota { .. } | Self::Floors { .. }
        )
    }
}

impl SequenceError {
    /// Returns what must happen before the operation can succeed.
    pub const fn retry(&self) -> Retry {
        match self {
            Self::Alloc(error) => error.retry(),
            _ => Retry::Never,
        }
    }
}

impl StepError {
    /// Returns what must happen before the first sequence that failed gets its tokens. Other
    /// sequences of the step may lack blocks too.
    pub const fn retry(&self) -> Retry {
        match self {
            Self::Lacking { error, .. } => error.retry(),
            Self::Sequence { error, .. } => error.retry(),
        }
    }
}

impl TransferError {
    /// Returns what must happen before the transfer can succeed.
    pub const fn retry(&self) -> Retry {
        match self {
            Self::Alloc(error) | Self::Sequence(SequenceError::Alloc(error)) => error.retry(),
            Self::BeingWritten { .. } => Retry::AfterBatch,
            Self::InTransfer { .. } => Retry::AfterTransfer,
            _ => Retry::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{SequenceId, Ticket};

    #[test]
    fn the_nearest_end_that_suffices_is_named() {
        let with = |asked, oldest_batch| AllocError::Exhausted {
            asked,
            free: 1,
            retired: 2,
            evictable: 3,
            held: 4,
            in_transfer: 5,
            oldest_batch,
        };
        let of = |asked| with(asked, Some(Ticket(1)));
        assert_eq!(with(6, None).retry(), Retry::AfterTransfer, "no batch is in flight");
        for (asked, retry) in [(6, Retry::AfterBatch), (11, Retry::AfterTransfer), (12, Retry::AfterFree)] {
            assert_eq!(of(asked).retry(), retry, "{asked}");
            let step = StepError::Lacking { sequences: vec![SequenceId(1)], error: of(asked) };
            assert_eq!(step.retry(), retry);
            let nested = SequenceError::from(of(asked));
            assert_eq!(TransferError::from(nested).retry(), retry);
        }
        let written = TransferError::BeingWritten { id: SequenceId(1), batch: Ticket(2) };
        assert_eq!((written.retry(), AllocError::Zero.retry()), (Retry::AfterBatch, Retry::Never));
    }
}
