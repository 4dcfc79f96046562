//! Frames to cells, cells to strips of equal colour.
//!
//! A panel has the same width for every pool. A small pool has few columns of wide cells, a large
//! one many of narrow ones, and beyond that several frames share a cell. So a picture is about as
//! high as a screen at most, and a panel has at most [`CELLS_MAX`] strips.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::palette::{Colour, mix};

/// The width of a panel, in pixels.
pub const WIDTH: usize = 768;

/// Columns by the number of frames: up to the first number, the second.
const COLUMNS: [(usize, usize); 3] = [(2048, 64), (8192, 128), (usize::MAX, 256)];

/// The largest number of rows.
const ROWS_MAX: usize = 264;

/// The largest number of cells of a panel.
pub const CELLS_MAX: usize = 256 * ROWS_MAX;

/// The preferred height of all rows, and the least and greatest height of one, in pixels.
const HEIGHT: usize = 600;
const ROW_MIN: usize = 3;
const ROW_MAX: usize = 14;

/// The layout of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Cells of a row, a power of two.
    pub columns: usize,
    /// Rows; the last may not be full.
    pub rows: usize,
    /// Frames of a cell, a power of two.
    pub group: usize,
}

impl Grid {
    /// Creates the grid for `frames` frames.
    pub fn new(frames: usize) -> Self {
        let fitting = COLUMNS.iter().find(|(frames_max, _)| frames <= *frames_max);
        let columns = fitting.map_or(COLUMNS[COLUMNS.len() - 1].1, |&(_, columns)| columns);
        let mut group = 1;
        while frames.div_ceil(group) > CELLS_MAX {
            group *= 2;
        }
        Self { columns, rows: frames.div_ceil(group).div_ceil(columns).max(1), group }
    }

    /// Returns the width of a cell, in pixels.
    pub const fn cell_width(&self) -> usize {
        WIDTH / self.columns
    }

    /// Returns the height of a row, in pixels.
    pub fn row_height(&self) -> usize {
        (HEIGHT / self.rows).clamp(ROW_MIN, ROW_MAX)
    }

    /// Returns the height of the panel, in pixels.
    pub fn height(&self) -> usize {
        self.rows * self.row_height()
    }

    /// Returns the number of frames of a row.
    pub const fn row_frames(&self) -> usize {
        self.columns * self.group
    }

    /// Returns a path for each colour, in cells: a line through the middle of each strip, relative
    /// to the end of the previous one.
    pub fn strips(&self, colours: &[Colour]) -> BTreeMap<Colour, String> {
        let cells: Vec<Colour> = colours.chunks(self.group).map(mix).collect();
        let mut paths: BTreeMap<Colour, (String, i64, i64)> = BTreeMap::new();
        for (row, cells) in cells.chunks(self.columns).enumerate() {
            let mut column = 0;
            for strip in cells.chunk_by(|a, b| a == b) {
                let (x, y) = (column as i64, row as i64);
                let (path, at_x, at_y) = paths.entry(strip[0]).or_insert_with(|| ("M0 .5".to_owned(), 0, 0));
                let length = strip.len() as i64;
                // Writing to a string does not fail.
                let _ = write!(path, "m{} {}h{length}", x - *at_x, y - *at_y);
                (*at_x, *at_y) = (x + length, y);
                column += strip.len();
            }
        }
        paths.into_iter().map(|(colour, (path, ..))| (colour, path)).collect()
    }
}
