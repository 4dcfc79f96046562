//! The colour of a class, and the mix of many.
//!
//! Owned frames are blues and fragments a vermilion, which readers with any of the usual colour
//! deficiencies tell apart (after Okabe and Ito). The others differ in lightness, in print as well:
//! runs are the lightest, fixed frames the darkest.

use std::fmt;

use kvpool::compact::Snapshot;

use super::Group;
use super::class::{self, Class, SHADES as SHADE_COUNT};

/// A colour: red, green, blue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Colour(pub u8, pub u8, pub u8);

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }
}

/// Free, in a whole run.
pub const RUN: Colour = Colour(0xcd, 0xee, 0xd9);
/// Free, outside whole runs.
pub const FRAGMENT: Colour = Colour(0xe6, 0x55, 0x0d);
/// Free, in a magazine or retired.
pub const AWAY: Colour = Colour(0xa9, 0xa6, 0xa0);
/// Owned, and immovable.
pub const FIXED: Colour = Colour(0x14, 0x1c, 0x26);
/// Free, in a unit that a sequence reserves for its growth.
pub const RESERVED_FOR_GROWTH: Colour = Colour(0xde, 0xb5, 0xd3);
/// Evictable.
pub const EVICTABLE: Colour = Colour(0xf2, 0xdf, 0x86);
/// Owned by no sequence.
pub const UNNAMED: Colour = Colour(0x6c, 0x7f, 0x93);
/// Owned, by sequence.
pub const SHADES: [Colour; SHADE_COUNT as usize] = [
    Colour(0x1c, 0x4f, 0x80),
    Colour(0x5f, 0x9f, 0xd6),
    Colour(0x2f, 0x74, 0xb5),
    Colour(0x86, 0xb4, 0xe0),
    Colour(0x3b, 0x5b, 0xa5),
    Colour(0x47, 0x8c, 0xb8),
];

/// Steps of a colour channel in a mix: few enough that neighbours are often equal.
const MIX_STEP: u32 = 12;

/// Returns the colour of each frame.
pub fn colours(snapshot: &Snapshot, groups: &[Group]) -> Vec<Colour> {
    class::classes(snapshot, groups).into_iter().map(colour).collect()
}

/// Returns the colour of a class.
pub fn colour(class: Class) -> Colour {
    match class {
        Class::Run => RUN,
        Class::Fragment => FRAGMENT,
        Class::ReservedForGrowth => RESERVED_FOR_GROWTH,
        Class::Away => AWAY,
        Class::Owned(shade) => SHADES[usize::from(shade % SHADE_COUNT)],
        Class::Unnamed => UNNAMED,
        Class::Evictable => EVICTABLE,
        Class::Fixed => FIXED,
    }
}

/// Returns one colour for several: theirs if they are equal, else the mean, rounded.
pub fn mix(colours: &[Colour]) -> Colour {
    let first = colours[0];
    if colours.iter().all(|&colour| colour == first) {
        return first;
    }
    let mean = |channel: fn(&Colour) -> u8| {
        let mean =
            colours.iter().map(|colour| u32::from(channel(colour))).sum::<u32>() / colours.len() as u32;
        ((mean + MIX_STEP / 2) / MIX_STEP * MIX_STEP).min(255) as u8
    };
    Colour(mean(|colour| colour.0), mean(|colour| colour.1), mean(|colour| colour.2))
}
