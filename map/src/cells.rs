//! The view of a pool as text, and its changes.

use std::mem::discriminant;

use kvpool::compact::{FrameState, Snapshot};
use serde::{Deserialize, Serialize};

use super::class::{self, Class};

/// A view of all frames of a pool, in the order of addresses: a letter for each cell.
///
/// A cell is one frame, or a group of them. A frame has one letter, that of [`Class::letter`]. A
/// group has two: of its most common class, and of the most common one among the others if these
/// are an eighth of its frames or more, else the first one again. Sequences are one class here.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Cells {
    /// Number of frames.
    pub frames: usize,
    /// Frames of a cell, a power of two; the last cell may have fewer.
    pub group: usize,
    /// The pool's order k: a whole run has 2^k frames.
    pub order: u8,
    /// The letters of each cell: one, or two if `group` is larger than 1.
    pub cells: String,
}

/// Cells that changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CellChanges {
    /// The place of a letter, and the letters from there on.
    pub changes: Vec<(usize, String)>,
}

/// Unchanged cells between two changed ones up to which one run covers both: about the size that a
/// second run costs.
const BRIDGE: usize = 8;

impl Cells {
    /// Returns the view of a snapshot with at most `cells_max` cells, which is at least 1.
    pub fn of(snapshot: &Snapshot, cells_max: usize) -> Self {
        let classes = class::classes(snapshot, &[]);
        let group = group(classes.len(), cells_max);
        let letters = group.min(2);
        let text = classes.chunks(group).flat_map(|cell| two_classes(cell).into_iter().take(letters));
        let cells = text.map(Class::letter).collect();
        Self { frames: classes.len(), group, order: snapshot.order().0, cells }
    }

    /// Returns the cells that are different in a later view; `None` if it has another shape.
    pub fn changes(&self, after: &Self) -> Option<CellChanges> {
        let shape = |cells: &Self| (cells.frames, cells.group, cells.order, cells.cells.len());
        if shape(self) != shape(after) {
            return None;
        }
        let mut changes: Vec<(usize, String)> = Vec::new();
        let pairs = self.cells.bytes().zip(after.cells.bytes()).enumerate();
        for (at, _) in pairs.filter(|(_, (before, after))| before != after) {
            match changes.last_mut() {
                Some((start, cells)) if at - (*start + cells.len()) < BRIDGE => {
                    cells.push_str(&after.cells[*start + cells.len()..=at]);
                }
                _ => changes.push((at, after.cells[at..=at].to_owned())),
            }
        }
        Some(CellChanges { changes })
    }

    /// Changes cells. Returns false, without effect, if a change is outside of the view or has a
    /// letter of no class.
    pub fn apply(&mut self, changes: &CellChanges) -> bool {
        let fits = |(start, cells): &(usize, String)| {
            start.checked_add(cells.len()).is_some_and(|end| end <= self.cells.len())
                && cells.chars().all(|letter| Class::of_letter(letter).is_some())
        };
        if !changes.changes.iter().all(fits) {
            return false;
        }
        for (start, cells) in &changes.changes {
            self.cells.replace_range(*start..start + cells.len(), cells);
        }
        true
    }
}

/// Returns the sequences of each cell of a view, as indices into those of the snapshot: at most
/// `max` for a cell.
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
