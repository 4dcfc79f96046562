//! The task whose turn it is to move blocks, in errors and statistics.

use std::fmt;
use std::time::Duration;

use super::Millis;

/// Kind of task that moves blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum TurnTask {
    /// A call of [`Pool::defragment`](crate::Pool::defragment).
    Defragment,
    /// The [background task](crate::Pool::start_defragmenter).
    Background,
    /// A waiting request that needs a run of blocks.
    Request,
    /// A [resize](crate::Pool::resize).
    Resize,
}

/// The task whose turn it is to move blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TurnHolder {
    /// Kind of task.
    pub task: TurnTask,
    age: Millis,
    unpolled: Option<Millis>,
}

impl TurnHolder {
    pub(crate) fn new(task: TurnTask, age: Duration, unpolled: Option<Duration>) -> Self {
        Self { task, age: Millis::of(age), unpolled: unpolled.map(Millis::of) }
    }

    /// Returns how long the task has had its turn, in milliseconds.
    pub const fn age(&self) -> Duration {
        self.age.get()
    }

    /// Returns the time since its future was last polled and its last copy ended, in milliseconds;
    /// `None` while it is being polled or copied. The pool [passes
    /// over](crate::pool::PoolBuilder::turn_patience) a task that is not polled.
    pub fn unpolled(&self) -> Option<Duration> {
        self.unpolled.map(Millis::get)
    }
}

impl fmt::Display for TurnHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.task {
            TurnTask::Defragment => "a defragmentation",
            TurnTask::Background => "the background defragmenter",
            TurnTask::Request => "a request that waits for a run",
            TurnTask::Resize => "a resize",
        })?;
        write!(f, " has had the turn to move blocks for {:.1?}", self.age())?;
        self.unpolled().map_or(Ok(()), |time| write!(f, ", and was last polled {time:.1?} ago"))
    }
}
