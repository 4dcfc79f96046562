//! What is wrong with a share or a schedule: which item, what stands there, what was expected.

use thiserror::Error;

use super::Share;

/// Why a text is no share of requests.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ShareError {
    /// It does not end in a percent sign.
    #[error("\"{text}\" has no percent sign; a share is written as 60%")]
    NoPercent {
        /// What stands there.
        text: String,
    },
    /// What stands before the sign is no number.
    #[error("\"{text}\" is no number of percent")]
    Number {
        /// What stands there.
        text: String,
    },
    /// None, all, or beyond.
    #[error("\"{text}\" is not more than 0% and less than 100%")]
    OutOfRange {
        /// What stands there.
        text: String,
    },
}

/// Why a text is no schedule of sizes. Items are numbered from 1.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An item is not a share, a colon and a number of blocks.
    #[error("item {number}, \"{item}\": no colon; an item is written as 60%:80000")]
    NoColon {
        /// Which item.
        number: usize,
        /// What stands there.
        item: String,
    },
    /// What stands before the colon is no share.
    #[error("item {number}, \"{item}\": {reason}")]
    Share {
        /// Which item.
        number: usize,
        /// What stands there.
        item: String,
        /// What is wrong with the share.
        reason: ShareError,
    },
    /// What stands behind the colon is no number of blocks that a pool can have.
    #[error("item {number}, \"{item}\": the blocks are no whole number from 1 to {max}")]
    Blocks {
        /// Which item.
        number: usize,
        /// What stands there.
        item: String,
        /// The most.
        max: u64,
    },
    /// An item does not stand behind the one before.
    #[error("item {number}, \"{item}\": not after the item before it, at {before}")]
    NotRising {
        /// Which item.
        number: usize,
        /// What stands there.
        item: String,
        /// When the item before it is due.
        before: Share,
    },
    /// More items than make sense.
    #[error("more than {max} items")]
    TooMany {
        /// The most.
        max: usize,
    },
}
