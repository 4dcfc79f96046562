//! A picture of a pool: which frames are free, which are owned, and how the free ones hang together.
//!
//! [`draw`] is a pure function from plain data to an SVG of one file without scripts. A panel is the pool at one moment,
//! frame by frame in the order of addresses; next to each other, two panels show what a defragmentation has changed.
//!
//! | file | what |
//! |---|---|
//! | `gather` | from a pool's snapshot |
//! | `figures` | what can be counted: fragmentation, runs, how sequences hang together |
//! | `palette` | a frame's tone, a tone's colour, and the mix of many |
//! | `grid` | frames to cells, cells to strips of equal colour |
//! | `draw` | the sheet: title, legend, tiles, panels, bars |
//!
//! # What the colours say
//!
//! | tone | frames |
//! |---|---|
//! | run | free, in a free aligned run of 2^k: the pool's order k, which fragmentation is counted at |
//! | crumb | free, in none: what fragmentation is |
//! | away | free too, but in a thread's magazine, or retired until batches have ended |
//! | owned | blocks that may be moved; each sequence has one of a few shades, so that broken runs show as stripes |
//! | unnamed | blocks of no sequence that may be moved: those that the prefix cache keeps, or an engine by itself |
//! | fixed | owned and not to be moved: open, pinned, or the null block |
//!
//! `run + crumb + away + owned + unnamed + fixed == frames`, and fragmentation is `(crumb + away) / (run + crumb + away)`.

mod draw;
mod figures;
mod gather;
mod grid;
mod palette;
#[cfg(test)]
mod tests;

pub use draw::draw;
pub use figures::Figures;
pub use gather::frames;

/// The place of a frame's block in a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The sequence, by any number that stays the same from one panel to the next.
    pub sequence: u64,
    /// The block's place in it.
    pub place: u32,
}

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Frame {
    /// Nothing, and it can be had.
    Free,
    /// Nothing, but it is in a magazine or retired.
    Away,
    /// A block that may be moved, of a sequence unless an engine keeps it by itself.
    Movable(Option<Owner>),
    /// A block that may not.
    Fixed(Option<Owner>),
}

impl Frame {
    /// Whether nobody owns it.
    pub const fn is_free(self) -> bool {
        matches!(self, Self::Free | Self::Away)
    }

    /// Whose it is.
    pub const fn owner(self) -> Option<Owner> {
        match self {
            Self::Movable(owner) | Self::Fixed(owner) => owner,
            Self::Free | Self::Away => None,
        }
    }
}

/// A pool at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Panel {
    /// Which moment.
    pub title: String,
    /// All frames, by address.
    pub frames: Vec<Frame>,
}

/// What is to be drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// What it is.
    pub title: String,
    /// Lines below the title.
    pub notes: Vec<String>,
    /// The order of the runs that are told from crumbs.
    pub order: u8,
    /// From left to right.
    pub panels: Vec<Panel>,
}
