//! What the target of a [transfer](super::transfer) must know of a sequence before its bytes
//! arrive. It may come from another process: nothing of it holds before it is checked.

use std::fmt;
use std::ops::Range;

use crate::error::Invalid;
use crate::ids::{Priority, SequenceId, TenantId};

use super::registry::Sequences;
use super::token_hashes::KnownTokens;
use super::window::{ListKind, Window};

/// A copy of a sequence in another pool starts with this and the bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Outline {
    pub(crate) id: SequenceId,
    pub(crate) priority: Priority,
    pub(crate) length: u32,
    pub(crate) committed: u32,
    pub(crate) reuses_tail: bool,
    pub(crate) tenant: Option<TenantId>,
    pub(crate) lists: Vec<ListOutline>,
    /// Frames of each state.
    pub(crate) states: Vec<u32>,
    /// Tokens that the states hold; 0 without states.
    pub(crate) state_tokens: u32,
}

/// One of its lists.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct ListOutline {
    pub(crate) keeps: Keeps,
    /// Places below it, except those of sinks, were given up.
    pub(crate) front: u32,
    /// `None` in a pool without a prefix cache.
    pub(crate) known: Option<KnownTokens>,
}

/// What a list keeps, as pools compare it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Keeps {
    pub(crate) block_tokens: u32,
    /// Tokens of the window, and sinks.
    window: Option<(u32, u32)>,
}

impl Keeps {
    /// Returns the places of a list of this many tokens that were given up, also of unchecked
    /// numbers.
    fn gap(self, front: u32) -> Range<u32> {
        // Without a window, none.
        let sinks = self.window.map_or(front, |(_, sinks)| sinks.div_ceil(self.block_tokens.max(1)));
        sinks.min(front)..front
    }

    /// Returns an error unless a list can have given up this number of first blocks.
    pub(crate) fn check_front(self, front: u32, outline: &Outline) -> Result<(), Invalid> {
        let window = match self.window {
            Some((tokens, sinks)) => Some(Window::new(tokens as usize)?.sinks(sinks)),
            None => None,
        };
        let Outline { committed, length, .. } = *outline;
        let most = window.map_or(0, |window| window.front_max(committed, length, self.block_tokens));
        let limit = || format!("at most {most}, by the window and the final tokens");
        if front > most { Err(Invalid::new("blocks given up", front, limit())) } else { Ok(()) }
    }
}

impl From<ListKind> for Keeps {
    fn from(kind: ListKind) -> Self {
        let window = |window: Window| (window.tokens() as u32, window.sink_tokens() as u32);
        Self { block_tokens: kind.block_tokens, window: kind.window.map(window) }
    }
}

impl fmt::Display for Keeps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.window {
            None => f.write_str("all tokens")?,
            Some((tokens, 0)) => write!(f, "a window of {tokens} tokens")?,
            Some((tokens, sinks)) => write!(f, "a window of {tokens} tokens and {sinks} sinks")?,
        }
        write!(f, " in blocks of {}", self.block_tokens)
    }
}

impl Outline {
    /// Drops the hashes, unless the target's cache hashes alike. The ids stay known.
    pub(crate) fn hashed_alike(mut self, is_alike: bool) -> Self {
        let known = self.lists.iter_mut().flat_map(|list| &mut list.known);
        known.for_each(|known| known.is_stale |= !is_alike);
        self
    }

    /// Returns the number of its blocks, also if it is not checked yet.
    pub(crate) fn blocks(&self) -> u64 {
        let of = |list: &ListOutline| {
            let blocks = self.length.div_ceil(list.keeps.block_tokens.max(1));
            u64::from(blocks.saturating_sub(list.keeps.gap(list.front).len() as u32))
        };
        let lists = self.lists.iter().map(of).sum::<u64>();
        lists + self.states.iter().map(|&frames| u64::from(frames)).sum::<u64>()
    }

    /// Returns an error that says what differs, if the target has other groups of layers.
    pub(crate) fn check_groups(&self, target: &Sequences) -> Result<(), Invalid> {
        let lists = self.lists.iter().map(|list| list.keeps).collect();
        Groups { lists, states: self.states.clone() }.check(target)
    }
}

/// The groups of layers of a pool, as pools compare them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Groups {
    lists: Vec<Keeps>,
    /// Frames of each state.
    states: Vec<u32>,
}

impl Sequences {
    /// Returns an error that says what differs, if the target has other groups of layers.
    pub(crate) fn check_same_groups(&self, target: &Self) -> Result<(), Invalid> {
        self.groups_of_layers().check(target)
    }

    pub(crate) fn groups_of_layers(&self) -> Groups {
        let lists = self.kinds().iter().map(|&kind| kind.into()).collect();
        Groups { lists, states: self.states().iter().map(|&frames| frames as u32).collect() }
    }
}

impl Groups {
    /// Returns an error that says what differs, if the target has others.
    pub(crate) fn check(&self, target: &Sequences) -> Result<(), Invalid> {
        let differs = |what, got: &dyn fmt::Display, has: &dyn fmt::Display| {
            Invalid::new(what, got, format_args!("{has}, as in the target"))
        };
        let has = target.groups_of_layers();
        if self.lists.len() != has.lists.len() {
            return Err(differs("lists of blocks", &self.lists.len(), &has.lists.len()));
        }
        for (place, (keeps, has)) in (0..).zip(self.lists.iter().zip(&has.lists)) {
            if keeps != has {
                return Err(differs("list of blocks", keeps, has).at(place));
            }
        }
        if self.states != has.states {
            let frames = |frames: &[u32]| format!("frames {frames:?}");
            return Err(differs("states", &frames(&self.states), &frames(&has.states)));
        }
        Ok(())
    }

    /// Returns an error unless there is a list or, behind the lists, a state of this number.
    pub(crate) fn check_group(&self, group: u32) -> Result<(), Invalid> {
        let count = self.lists.len() + self.states.len();
        let limit = format_args!("less than {count}, the lists and states").to_string();
        if (group as usize) < count { Ok(()) } else { Err(Invalid::new("group of layers", group, limit)) }
    }
}
