//! The class of a frame: what a picture distinguishes.

use kvpool::compact::{FrameKind, FrameState, Snapshot};

use super::Group;

/// Number of shades of [`Class::Owned`].
pub const SHADES: u8 = 6;

/// What a picture shows of a frame. See the [crate's documentation](crate) for their meaning.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Free, in a whole run.
    Run,
    /// Free, outside of whole runs.
    Fragment,
    /// Free, in a unit that a sequence reserves for its growth.
    ReservedForGrowth,
    /// Free, in a magazine or retired.
    Away,
    /// A movable block of a sequence, with the sequence's shade, below [`SHADES`].
    Owned(u8),
    /// A movable block of no sequence.
    Unnamed,
    /// Evictable.
    Evictable,
    /// Open or pinned.
    Fixed,
}

impl Class {
    /// Returns all classes, in the order of a legend.
    pub fn all() -> impl Iterator<Item = Self> {
        let shades = (0..SHADES).map(Self::Owned);
        [Self::Run, Self::Fragment, Self::ReservedForGrowth, Self::Away].into_iter().chain(shades).chain([
            Self::Unnamed,
            Self::Evictable,
            Self::Fixed,
        ])
    }

    /// Returns its letter in [`Cells`](crate::Cells): a byte of ASCII.
    pub const fn letter(self) -> char {
        match self {
            Self::Run => 'r',
            Self::Fragment => 'c',
            Self::ReservedForGrowth => 's',
            Self::Away => 'a',
            Self::Owned(shade) => (b'0' + shade % SHADES) as char,
            Self::Unnamed => 'u',
            Self::Evictable => 'e',
            Self::Fixed => 'f',
        }
    }

    /// Returns the class of a letter.
    pub fn of_letter(letter: char) -> Option<Self> {
        Self::all().find(|class| class.letter() == letter)
    }
}

/// Returns the class of each frame, with a shade for each group, or for each sequence.
pub(crate) fn classes(snapshot: &Snapshot, groups: &[Group]) -> Vec<Class> {
    let frames = snapshot.frames();
    let lists = groups.iter().map(|group| group.lists.end).max().unwrap_or(0);
    // A snapshot names a sequence once for each of its lists, in their order.
    let of_list = |index: usize| {
        let list = index.checked_rem(lists)?;
        groups.iter().position(|group| group.lists.contains(&list))
    };
    let class = |frame: &FrameState| match frame.kind() {
        FrameKind::Free => Class::Fragment,
        FrameKind::Away => Class::Away,
        FrameKind::ReservedForGrowth => Class::ReservedForGrowth,
        FrameKind::Evictable => Class::Evictable,
        FrameKind::Movable => {
            let block = frame.block().map(|(index, _)| index as usize);
            let sequence = block.and_then(|index| Some((index, snapshot.sequences().get(index)?)));
            sequence.map_or(Class::Unnamed, |(index, id)| {
                Class::Owned(of_list(index).map_or_else(|| shade(id.0), shade_of_group))
            })
        }
        FrameKind::Fixed => Class::Fixed,
    };
    let mut classes: Vec<Class> = frames.iter().map(class).collect();
    let run = snapshot.order().frames();
    for (classes, frames) in classes.chunks_exact_mut(run).zip(frames.chunks_exact(run)) {
        if frames.iter().all(|frame| frame.kind() == FrameKind::Free) {
            classes.fill(Class::Run);
        }
    }
    classes
}

/// Returns the shade of a group, by its number: the first ones differ most.
pub(crate) fn shade_of_group(group: usize) -> u8 {
    [0, 3, 2, 1, 4, 5][group % usize::from(SHADES)]
}

/// Returns a sequence's shade: the same in every picture, and rarely that of its neighbour.
fn shade(sequence: u64) -> u8 {
    // Fibonacci hashing: the upper bits of a product with 2^64 divided by the golden ratio.
    let hash = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((hash * u64::from(SHADES)) >> 32) as u8
}
