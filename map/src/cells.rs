//! The view of a pool as text, and its changes.

use kvpool::compact::Snapshot;

use super::class::{self, Class};

/// A view of all frames of a pool, in the order of addresses: a letter for each cell.
///
/// A cell is one frame, or a group of them; a group shows its most common class. The letters are
/// those of [`Class::letter`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cells {
    /// Number of frames.
    pub frames: usize,
    /// Frames of a cell, a power of two; the last cell may have fewer.
    pub group: usize,
    /// The pool's order k: a whole run has 2^k frames.
    pub order: u8,
    /// A letter for each cell.
    pub text: String,
}

/// Consecutive cells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CellRun {
    /// Number of the first cell.
    pub start: usize,
    /// Their letters.
    pub text: String,
}

/// Unchanged cells between two changed ones up to which one run covers both: about the size that a
/// second run costs.
const BRIDGE: usize = 8;

impl Cells {
    /// Returns the view of a snapshot with at most `cells_max` cells, which is at least 1.
    pub fn of(snapshot: &Snapshot, cells_max: usize) -> Self {
        let classes = class::classes(snapshot);
        let mut group = 1;
        while classes.len().div_ceil(group) > cells_max.max(1) {
            group *= 2;
        }
        let text = classes.chunks(group).map(|classes| most_common(classes).letter()).collect();
        Self { frames: classes.len(), group, order: snapshot.order().0, text }
    }

    /// Returns the cells that are different in a later view; `None` if it has another shape.
    pub fn changes(&self, after: &Self) -> Option<Vec<CellRun>> {
        let shape = |cells: &Self| (cells.frames, cells.group, cells.order, cells.text.len());
        if shape(self) != shape(after) {
            return None;
        }
        let mut runs: Vec<CellRun> = Vec::new();
        let pairs = self.text.bytes().zip(after.text.bytes()).enumerate();
        for (at, _) in pairs.filter(|(_, (before, after))| before != after) {
            match runs.last_mut() {
                Some(run) if at - (run.start + run.text.len()) < BRIDGE => {
                    run.text.push_str(&after.text[run.start + run.text.len()..=at]);
                }
                _ => runs.push(CellRun { start: at, text: after.text[at..=at].to_owned() }),
            }
        }
        Some(runs)
    }

    /// Changes cells.
    ///
    /// # Errors
    ///
    /// The first run that is outside of the view, or has a letter of no class. No cell is changed.
    pub fn apply<'a>(&mut self, runs: &'a [CellRun]) -> Result<(), &'a CellRun> {
        let fits = |run: &CellRun| {
            run.start.checked_add(run.text.len()).is_some_and(|end| end <= self.text.len())
                && run.text.chars().all(|letter| Class::of_letter(letter).is_some())
        };
        if let Some(bad) = runs.iter().find(|run| !fits(run)) {
            return Err(bad);
        }
        for run in runs {
            self.text.replace_range(run.start..run.start + run.text.len(), &run.text);
        }
        Ok(())
    }
}

/// Returns the most common class; of several, the one that comes first.
fn most_common(classes: &[Class]) -> Class {
    let first = classes[0];
    if classes.iter().all(|&class| class == first) {
        return first;
    }
    let count = |class: Class| classes.iter().filter(|&&other| other == class).count();
    // Of equal maxima, `max_by_key` returns the last.
    Class::all().collect::<Vec<_>>().into_iter().rev().max_by_key(|&class| count(class)).unwrap_or(first)
}
