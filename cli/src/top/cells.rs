//! The memory map as characters: one per class of frames, so that no colour is needed.

use kvpool_node::admin::Cells;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Class {
    pub symbol: char,
    pub name: &'static str,
}

pub(super) const CLASSES: [Class; 8] = [
    Class { symbol: '#', name: "owned" },
    Class { symbol: '@', name: "of no sequence" },
    Class { symbol: 'X', name: "not movable" },
    Class { symbol: '+', name: "cached" },
    Class { symbol: '.', name: "free run" },
    Class { symbol: ':', name: "free, scattered" },
    Class { symbol: '-', name: "reserved for growth" },
    Class { symbol: '~', name: "in stock, retired" },
];

/// Returns the index in [`CLASSES`] of a letter of the map; `None` for one of a later version.
fn class(letter: u8) -> Option<usize> {
    Some(match letter {
        b'0'..=b'9' => 0,
        b'u' => 1,
        b'f' => 2,
        b'e' => 3,
        b'r' => 4,
        b'c' => 5,
        b's' => 6,
        b'a' => 7,
        _ => return None,
    })
}

/// The character of several frames without a majority class.
pub(super) const MIXED: char = '%';

#[derive(Debug)]
pub(super) struct Drawn {
    /// Lines of characters.
    pub rows: Vec<String>,
    /// Frames per character.
    pub group: usize,
    /// Number of cells by class.
    pub counts: [usize; CLASSES.len()],
}

/// Draws a map into at most this many characters. Where several frames share one, it shows the
/// class that has half of them, or [`MIXED`].
pub(super) fn draw(map: &Cells, width: usize, height: usize) -> Drawn {
    // A group of frames has two letters.
    let letters = map.group.clamp(1, 2);
    let cells: Vec<_> = map.cells.as_bytes().chunks(letters).collect();
    let mut counts = [0; CLASSES.len()];
    cells.iter().filter_map(|letters| class(letters[0])).for_each(|class| counts[class] += 1);
    let together = cells.len().div_ceil((width * height).max(1)).max(1);
    let symbols: Vec<char> = cells.chunks(together).map(|cells| most_common(&cells.concat())).collect();
    let rows = symbols.chunks(width.max(1)).map(|row| row.iter().collect()).collect();
    Drawn { rows, group: together * map.group, counts }
}

fn most_common(letters: &[u8]) -> char {
    let mut counts = [0; CLASSES.len()];
    letters.iter().filter_map(|&letter| class(letter)).for_each(|class| counts[class] += 1);
    let most = (0..counts.len()).rev().max_by_key(|&class| counts[class]);
    match most {
        Some(class) if counts[class] > 0 && 2 * counts[class] < letters.len() => MIXED,
        Some(class) if counts[class] > 0 => CLASSES[class].symbol,
        _ => '?',
    }
}
