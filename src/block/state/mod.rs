//! The state of a pool's blocks, without algorithms: packed words with their transitions, which are
//! pure functions, tables and the wait queue. Read `word` first.

mod counters;
mod grow_table;
mod info;
mod log;
mod refused;
mod sites;
mod table;
mod wait_queue;
mod word;

pub use counters::{AllocationCounts, Refusals, WaitCounts};
pub(in crate::block) use counters::{OwnCounters, SharedCounters};
pub(crate) use grow_table::{GrowTable, TablePart};
pub use info::BlockInfo;
pub(in crate::block) use info::InfoCell;
pub(in crate::block) use log::MoveLog;
pub use log::{MoveCount, Moved, Since};
pub(in crate::block) use refused::{Evictions, FreeRuns, Refused, TenantSet};
#[cfg(debug_assertions)]
pub(crate) use sites::Site;
pub(in crate::block) use sites::Sites;
pub use sites::SourcePlace;
pub(crate) use sites::{Note, Noted};
pub(in crate::block) use table::{Row, Table, TableView};
pub(crate) use wait_queue::Class;
pub(in crate::block) use wait_queue::{Absence, Key, QueuePlace, WaitQueue, Waiters};
pub use word::{BlockWord, Released};
