//! Places in the program that last allocated or pinned a block, in debug builds only. Plain stores
//! by the owner of its references, or by the thread that pinned it. Valid for one generation.

#[cfg(debug_assertions)]
use std::panic::Location;
use std::time::Duration;
#[cfg(debug_assertions)]
use std::time::Instant;

#[cfg(debug_assertions)]
use crate::ids::FRAMES_MAX;
use crate::ids::{BlockId, Generation};

#[cfg(debug_assertions)]
use super::grow_table::{GrowTable, TablePart};

#[cfg(debug_assertions)]
#[derive(Clone, Copy)]
pub(crate) struct Site(&'static Location<'static>);

#[cfg(debug_assertions)]
impl Site {
    /// Returns the place of the caller, looking through `#[track_caller]` functions.
    #[track_caller]
    pub(crate) fn here() -> Self {
        Self(Location::caller())
    }
}

/// A place in the source of the program.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SourcePlace {
    /// File, as passed to the compiler.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
}

impl std::fmt::Display for SourcePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

pub(crate) type Note = (SourcePlace, Duration);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Noted {
    Allocated,
    Pinned,
}

#[cfg(not(debug_assertions))]
pub(in crate::block) struct Sites;

#[cfg(not(debug_assertions))]
impl Sites {
    pub(in crate::block) fn new(_: usize) -> Self {
        Self
    }

    pub(in crate::block) fn grow(&self, _: usize) {}

    pub(in crate::block) fn read(&self, _: Noted, _: BlockId, _: Generation) -> Option<Note> {
        None
    }
}

#[cfg(debug_assertions)]
pub(in crate::block) use debug::Sites;

#[cfg(debug_assertions)]
mod debug {
    use super::*;
    use crate::sync::{Ordering::*, StatisticU64};

    /// The generation is stored last. In a race, a reader may get either thread's place.
    #[derive(Default)]
    struct Row {
        place: StatisticU64,
        since: StatisticU64,
        /// One more than the generation.
        generation: StatisticU64,
    }

    struct SiteRows(Box<[[Row; 2]]>);

    impl TablePart for SiteRows {
        fn new(_: usize, len: usize) -> Self {
            Self((0..len).map(|_| Default::default()).collect())
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    pub(in crate::block) struct Sites {
        rows: GrowTable<SiteRows>,
        built: Instant,
    }

    impl Sites {
        pub(in crate::block) fn new(rows: usize) -> Self {
            debug_assert!(rows <= FRAMES_MAX);
            Self { rows: GrowTable::new(rows), built: Instant::now() }
        }

        pub(in crate::block) fn grow(&self, rows: usize) {
            self.rows.grow(rows);
        }

        fn row(&self, what: Noted, id: BlockId) -> &Row {
            let (part, at) = self.rows.locate(id.index());
            &part.0[at][what as usize]
        }

        pub(in crate::block) fn note(&self, what: Noted, id: BlockId, of: Generation, site: Site) {
            let row = self.row(what, id);
            row.generation.store(0, Relaxed);
            row.place.store(std::ptr::from_ref(site.0).expose_provenance() as u64, Relaxed);
            row.since.store(self.built.elapsed().as_nanos() as u64, Relaxed);
            // Release: pairs with the Acquire of `read`.
            row.generation.store(of.0 + 1, Release);
        }

        pub(in crate::block) fn read(&self, what: Noted, id: BlockId, of: Generation) -> Option<Note> {
            let row = self.row(what, id);
            // Acquire: pairs with the Release of `note`.
            if row.generation.load(Acquire) != of.0 + 1 {
                return None;
            }
            let place =
                std::ptr::with_exposed_provenance::<Location<'static>>(row.place.load(Relaxed) as usize);
            // SAFETY: only addresses of `&'static Location` are stored, and one was.
            let place = unsafe { &*place };
            let since = Duration::from_nanos(row.since.load(Relaxed));
            let place = SourcePlace { file: place.file().into(), line: place.line(), column: place.column() };
            Some((place, self.built.elapsed().saturating_sub(since)))
        }
    }
}
