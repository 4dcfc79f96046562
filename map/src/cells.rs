//! The view of a pool as text, and its changes.

use std::mem::discriminant;

use kvpool::compact::{FrameState, Snapshot};

use super::class::{self, Class};

/// A view of all frames of a pool, in the order of addresses: a letter for each cell.
///
/// A cell is one frame, or a group of them. A frame has one letter, that of [`Class::letter`]. A group
/// has two: of its most common class, and of the most common one among the others if these are an
/// eighth of its frames or more, else the first one again. Sequences are one class here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cells {
    /// Number of frames.
    pub frames: usize,
    /// Frames of a cell, a power of two; the last cell may have fewer.
    pub group: usize,
    /// The pool's order k: a whole run has 2^k frames.
    pub order: u8,
    /// The letters of each cell: one, or two if `group` is larger than 1.
    pub text: String,
}

/// Consecutive letters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CellRun {
    /// Place of the first letter.
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
        let group = group(classes.len(), cells_max);
        let letters = group.min(2);
        let text = classes.chunks(group).flat_map(|cell| two_classes(cell).into_iter().take(letters));
        let text = text.map(Class::letter).collect();
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

/// Returns the sequences of each cell of a view, as indices into those of the snapshot: at most `max`
/// for a cell.
pub fn sequences(snapshot: &Snapshot, cells_max: usize, max: usize) -> Vec<Vec<u32>> {
    let of = |frames: &[FrameState]| {
        let mut found: Vec<u32> = frames.iter().filter_map(|frame| Some(frame.block()?.0)).collect();
        found.sort_unstable();
        found.dedup();
        found.truncate(max);
        found
    };
    snapshot.frames().chunks(group(snapshot.frames().len(), cells_max)).map(of).collect()
}

/// Returns the number of frames of a cell.
fn group(frames: usize, cells_max: usize) -> usize {
    frames.div_ceil(cells_max.max(1)).max(1).next_power_of_two()
}

/// Returns the most common class, and that of the others if they are many.
fn two_classes(classes: &[Class]) -> [Class; 2] {
    let first = most_common(classes);
    let is_other = |class: &&Class| discriminant(*class) != discriminant(&first);
    let others: Vec<Class> = classes.iter().filter(is_other).copied().collect();
    let is_mixed = !others.is_empty() && others.len() * 8 >= classes.len();
    [first, if is_mixed { most_common(&others) } else { first }]
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
