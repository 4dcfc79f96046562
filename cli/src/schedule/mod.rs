//! When something is to happen in a replay: at which share of its requests.
//!
//! ```text
//! share     = number "%"                     more than 0, less than 100
//! step      = share ":" blocks               what the pool is to have from there on
//! schedule  = step *("," step)               shares rise
//! ```

mod error;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

pub use error::{ScheduleError, ShareError};

/// The most blocks that a pool can have: as many as it can address, one of which is the null block.
pub const BLOCKS_MAX: u64 = kvpool::ids::FRAMES_MAX as u64 - 1;

/// The most steps of a schedule.
const STEPS_MAX: usize = 1000;

/// A share of a replay's requests, more than none and less than all: at none nothing is there yet, and at all nothing
/// is any more.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct Share {
    percent: f64,
}

impl Share {
    /// How many of `requests` this is, rounded up: one at least.
    pub fn of(self, requests: usize) -> u64 {
        (self.percent * requests as f64 / 100.0).ceil() as u64
    }
}

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        let owned = || text.to_owned();
        let number = text.trim().strip_suffix('%').ok_or_else(|| ShareError::NoPercent { text: owned() })?;
        let percent: f64 = number.trim().parse().map_err(|_| ShareError::Number { text: owned() })?;
        // Not a number is not in any range.
        if percent > 0.0 && percent < 100.0 {
            Ok(Self { percent })
        } else {
            Err(ShareError::OutOfRange { text: owned() })
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Two digits, as far as they say anything.
        let percent = format!("{:.2}", self.percent);
        write!(f, "{} %", percent.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// A size that the pool is to have from some moment on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// When.
    pub at: Share,
    /// How many blocks.
    pub blocks: usize,
}

/// Sizes that the pool is to have, one after the other.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Schedule(Vec<Step>);

impl Schedule {
    /// The steps, the first one first.
    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    /// The largest size in it.
    pub fn blocks_max(&self) -> Option<usize> {
        self.0.iter().map(|step| step.blocks).max()
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let mut steps: Vec<Step> = Vec::new();
        for (index, item) in text.split(',').map(str::trim).enumerate() {
            let (number, item) = (index + 1, || item.to_owned());
            if number > STEPS_MAX {
                return Err(ScheduleError::TooMany { max: STEPS_MAX });
            }
            let step = parse_step(number, &item())?;
            if let Some(before) = steps.last().filter(|before| before.at >= step.at) {
                return Err(ScheduleError::NotRising { number, item: item(), before: before.at });
            }
            steps.push(step);
        }
        Ok(Self(steps))
    }
}

fn parse_step(number: usize, item: &str) -> Result<Step, ScheduleError> {
    let owned = || item.to_owned();
    let (at, blocks) =
        item.split_once(':').ok_or_else(|| ScheduleError::NoColon { number, item: owned() })?;
    let at = at.parse().map_err(|reason| ScheduleError::Share { number, item: owned(), reason })?;
    let blocks: u64 = blocks.trim().parse().map_err(|_| ScheduleError::Blocks {
        number,
        item: owned(),
        max: BLOCKS_MAX,
    })?;
    if !(1..=BLOCKS_MAX).contains(&blocks) {
        return Err(ScheduleError::Blocks { number, item: owned(), max: BLOCKS_MAX });
    }
    Ok(Step { at, blocks: blocks as usize })
}
