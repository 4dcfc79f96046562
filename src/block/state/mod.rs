//! The data of a pool: packed words, tables and the line of waiting requests, without the algorithms on them.

mod info;
mod line;
mod log;
mod rows;
mod table;
mod word;

pub use info::BlockInfo;
pub(in crate::block) use line::{Absence, Key, Line, Place, Waiters};
pub(in crate::block) use log::MoveLog;
pub use log::{Moved, Since};
pub(crate) use rows::{Bucket, Rows};
pub(in crate::block) use table::Table;
pub use word::{BlockWord, Ownership, Released};
