//! A picture of a pool: free frames, owned frames, and the runs of free frames.
//!
//! [`draw`] turns snapshots of a pool into an SVG of one file without scripts. A panel shows the
//! pool at one moment, frame by frame in the order of addresses; two panels side by side show what
//! a defragmentation has changed.
//!
//! | file | content |
//! |---|---|
//! | `palette` | the colour of a frame, and the mix of many |
//! | `grid` | frames to cells, cells to strips of equal colour |
//! | `draw` | the sheet: title, legend, figures, panels, bars |
//!
//! # Colours
//!
//! | colour | frames |
//! |---|---|
//! | run | free, in a free aligned run of 2^k: the pool's order k, at which fragmentation is measured |
//! | crumb | free, outside such runs |
//! | spared | free, in a unit that a sequence spares for its growth |
//! | away | free, but in a thread's magazine, or retired until batches have ended |
//! | owned | movable blocks of sequences; each sequence has one of a few shades, so that broken runs show as stripes |
//! | unnamed | movable blocks of no sequence: an engine's own |
//! | evictable | blocks that only the prefix cache keeps: an allocation evicts them when it needs them |
//! | fixed | blocks that cannot be moved: open, pinned, or the null block |
//!
//! `run + crumb + spared + away + owned + unnamed + evictable + fixed == frames`. Where no frame is
//! spared, fragmentation is at least `(crumb + away) / (run + crumb + away)` less the runs that do
//! not fit.

mod draw;
mod grid;
mod palette;
#[cfg(test)]
mod tests;

use kvpool::compact::Snapshot;

pub use draw::draw;

/// The content of a picture.
pub struct Picture<'a> {
    /// The title.
    pub title: String,
    /// Lines below the title.
    pub notes: Vec<String>,
    /// The panels from left to right: a title, and all frames of a pool at one moment.
    pub panels: Vec<(&'static str, &'a Snapshot)>,
}
