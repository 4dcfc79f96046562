//! The state of a pool's blocks, without algorithms: packed words, tables and the line of waiting
//! requests.
//!
//! Transitions of a word are pure functions; the rooms of [`block`](crate::block) apply them.
//!
//! | file | contents |
//! |---|---|
//! | `word` | the block word and its transitions. Read it first: every protocol is about this word |
//! | `info` | 16 bytes per block beside its word: sequence, last access, high bits of the generation |
//! | `rows` | append-only table that grows by buckets; the prefix cache uses it, too |
//! | `table` | word, info and inverse map of each block, in such rows |
//! | `log` | ring of recent moves, by which batches patch block tables |
//! | `counters` | monotonic counters, per thread and shared |
//! | `refused` | what refused requests remember |
//! | `sites` | places in the program that allocated or pinned a block, in debug builds |
//! | `wait_queue` | places of waiting requests; the protocol is in [`wait`](crate::block::wait) |

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
pub(in crate::block) use refused::{Evictions, FreeRuns, Refused};
#[cfg(debug_assertions)]
pub(crate) use sites::Site;
pub(in crate::block) use sites::Sites;
pub use sites::SourcePlace;
pub(crate) use sites::{Note, Noted};
pub(in crate::block) use table::{Row, Table, TableView};
pub(crate) use wait_queue::Class;
pub(in crate::block) use wait_queue::{Absence, Key, QueuePlace, WaitQueue, Waiters};
pub use word::{BlockWord, Released};
