//! Pictures of a pool: free frames, owned frames, and the runs of free frames.
//!
//! [`draw`] turns snapshots of a pool into an SVG of one file without scripts. A panel shows the
//! pool at one moment, frame by frame in the order of addresses; two panels side by side show what
//! a defragmentation has changed. [`Cells`] is the same view as text, a letter for each frame or
//! group of frames, for displays that follow a pool while it changes.
//!
//! | file | content |
//! |---|---|
//! | `class` | the class of a frame, and its letter |
//! | `palette` | the colour of a class, and the mix of many |
//! | `grid` | frames to cells, cells to strips of equal colour |
//! | `draw` | the sheet: title, legend, figures, panels, bars |
//! | `cells` | the view as text, and its changes |
//!
//! # Classes
//!
//! | class | letter | frames |
//! |---|---|---|
//! | run | `r` | free, in a free aligned run of 2^k: the pool's order k, at which fragmentation is measured |
//! | fragment | `c` | free, outside such runs |
//! | reserved for growth | `s` | free, in a unit that a sequence reserves for its growth |
//! | away | `a` | free, but in a thread's magazine, or retired until batches have ended |
//! | owned | `0` to `5` | movable blocks, a shade for each sequence, or [group](Group) of layers |
//! | unnamed | `u` | movable blocks of no sequence: an engine's own |
//! | evictable | `e` | blocks that only the prefix cache keeps: an allocation evicts them when it needs them |
//! | fixed | `f` | blocks that cannot be moved: open, pinned, of a state, or the null block |
//!
//! `run + fragment + reserved_for_growth + away + owned + unnamed + evictable + fixed == frames`.
//! Where no frame is reserved for growth, fragmentation is at least `(fragment + away) / (run +
//! fragment + away)` less the runs that do not fit.

mod cells;
mod class;
mod draw;
mod grid;
mod palette;
#[cfg(test)]
mod tests;

use std::ops::Range;

use kvpool::compact::Snapshot;

pub use cells::{CellChanges, Cells, sequences};
pub use class::{Class, SHADES};
pub use draw::draw;

/// The content of a picture.
pub struct Picture<'a> {
    /// The title.
    pub title: String,
    /// Lines below the title.
    pub notes: Vec<String>,
    /// The panels from left to right: a title, and all frames of a pool at one moment.
    pub panels: Vec<(&'static str, &'a Snapshot)>,
    /// The groups of layers whose blocks are told apart. None: sequences are.
    pub groups: Vec<Group>,
}

/// A group of layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// What it keeps, for the legend.
    pub caption: String,
    /// Its lists of a sequence, by number. Those of all groups are all lists of a sequence.
    pub lists: Range<usize>,
}
