use kvpool::compact::{FrameKind, FrameState};
use kvpool::{FrameId, Order, SequenceId};
use proptest::prelude::*;

use super::grid::{CELLS_MAX, Grid, WIDTH};
use super::palette::{self, Colour};
use super::*;

fn snapshot(frames: Vec<FrameState>, order: u8) -> Snapshot {
    Snapshot::new(Order(order), frames, (70..80).map(SequenceId).collect())
}

/// `.` free, `s` reserved for growth, `a` away, `#` movable, `e` evictable, `!` fixed, digits
/// movable blocks of that sequence.
fn frames(text: &str) -> Vec<FrameState> {
    let frame = |(char, place): (char, u32)| match char {
        '.' => FrameState::FREE,
        's' => FrameState::RESERVED_FOR_GROWTH,
        'a' => FrameState::AWAY,
        'e' => FrameState::evictable(FrameId(place)),
        '#' => FrameState::new(FrameKind::Movable, None),
        '!' => FrameState::new(FrameKind::Fixed, None),
        digit => FrameState::new(FrameKind::Movable, Some((digit.to_digit(10).expect("a digit"), place))),
    };
    text.chars().zip(0..).map(frame).collect()
}

fn drawn(frames: Vec<FrameState>) -> String {
    let snapshot = snapshot(frames, 2);
    let panels = vec![("before", &snapshot), ("after", &snapshot)];
    let (title, notes) = ("a <pool> & its \"runs\"".to_owned(), vec!["one note".to_owned()]);
    draw(&Picture { title, notes, panels, groups: vec![] })
}

/// An aligned run that starts late, frames that are away, an end that is no multiple.
#[test]
fn free_frames_are_counted_by_their_runs() {
    let shares = draw::shares(&snapshot(frames("....a...........#."), 2));
    let of_17 = [2.0, 2.0, 4.0, 8.0].map(|frames| frames / 17.0);
    assert_eq!(shares[..4], of_17, "5 and 17; 6..8; 0..4; 8..16");
    assert_eq!(shares[4..], [0.0; 10]);
    assert_eq!(draw::shares(&snapshot(frames("####"), 2)), [0.0; 14]);
}

#[test]
fn colours_tell_runs_from_fragments() {
    let colours = palette::colours(&snapshot(frames("....#.a!"), 2), &[]);
    assert_eq!(colours[..4], [palette::RUN; 4]);
    assert_eq!(colours[4..], [palette::UNNAMED, palette::FRAGMENT, palette::AWAY, palette::FIXED]);
    let colours = palette::colours(&snapshot(frames("ssssse#."), 2), &[]);
    assert_eq!(colours[..5], [palette::RESERVED_FOR_GROWTH; 5], "they are no runs for others");
    assert_eq!(colours[5..], [palette::EVICTABLE, palette::UNNAMED, palette::FRAGMENT]);
    let colours = palette::colours(&snapshot(frames("1231"), 2), &[]);
    assert_eq!(colours[0], colours[3], "a sequence has one shade");
}

/// Two sequences with three lists each, of two groups.
#[test]
fn groups_have_a_shade_each() {
    let group = |caption: &str, lists| Group { caption: caption.to_owned(), lists };
    let groups = vec![group("window 128", 0..2), group("all", 2..3)];
    let snapshot = snapshot(frames("012345!"), 2);
    let colours = palette::colours(&snapshot, &groups);
    assert_eq!(colours[..3], colours[3..6], "of each sequence alike");
    assert_eq!((colours[0], colours[6]), (colours[1], palette::FIXED));
    assert_ne!(colours[1], colours[2]);
    let panels = vec![("now", &snapshot)];
    let svg = draw(&Picture { title: String::new(), notes: vec![], panels, groups });
    for (colour, caption) in [(colours[0], "owned, window 128"), (colours[2], "owned, all")] {
        assert!(svg.contains(&colour.to_string()) && svg.contains(caption), "{svg}");
    }
    assert!(svg.contains("of a state") && !svg.contains("each sequence"), "{svg}");
}

#[test]
fn classes_and_letters_are_one_to_one() {
    for class in Class::all() {
        assert_eq!(Class::of_letter(class.letter()), Some(class));
    }
    assert_eq!(Class::all().count(), 7 + usize::from(SHADES));
    assert_eq!([Class::of_letter('6'), Class::of_letter('x'), Class::of_letter('R')], [None; 3]);
}

#[test]
fn a_cell_shows_its_most_common_class() {
    let cells = Cells::of(&snapshot(frames("....#.a!ssse"), 2), 100);
    assert_eq!((cells.frames, cells.group, cells.order), (12, 1, 2));
    assert_eq!(cells.cells, "rrrrucafssse");
    let cells = Cells::of(&snapshot(frames("....##.!!!ae"), 2), 4);
    assert_eq!((cells.group, cells.cells.as_str()), (4, "rrucfa"), "of two equally common ones, the first");
    let cells = Cells::of(&snapshot(frames(&["12".repeat(8), "3".repeat(15) + "e"].concat()), 2), 2);
    let [two, few] = [&cells.cells[..2], &cells.cells[2..]];
    assert!(two.bytes().all(|letter| letter.is_ascii_digit()), "sequences are not another class: {two}");
    assert_eq!(few[..1], few[1..], "one frame of sixteen is not shown");
    assert_eq!(Cells::of(&snapshot(vec![], 2), 4).cells, "");
}

#[test]
fn a_cell_has_the_sequences_of_its_frames() {
    let snapshot = snapshot(frames("11..2312e!9....."), 1);
    assert_eq!(sequences(&snapshot, 4, 2), [vec![1], vec![1, 2], vec![9], vec![]]);
    let of_frames = sequences(&snapshot, 100, 2);
    assert_eq!((of_frames.len(), &of_frames[5]), (16, &vec![3]));
}

#[test]
fn changes_lead_from_one_view_to_the_next() {
    let cells = |text: &str| Cells::of(&snapshot(frames(text), 1), 1000);
    let (before, after) = (cells("..!!.!!!!!!!!!e"), cells("..!!e!!!!!!!!!!"));
    let changes = before.changes(&after).expect("they have the same shape");
    assert_eq!(changes.changes, [(4, "e"), (14, "f")].map(|(start, cells)| (start, cells.to_owned())));
    let mut patched = before.clone();
    assert!(patched.apply(&changes));
    assert_eq!(patched, after);
    assert_eq!(before.changes(&before), Some(CellChanges { changes: vec![] }));
    assert_eq!(before.changes(&cells("..")), None, "another shape");
    for bad in [(14, "ff"), (usize::MAX, "f"), (3, "\u{fc}")] {
        let changes = [(0, "f"), bad].map(|(start, cells)| (start, cells.to_owned())).to_vec();
        assert!(!patched.apply(&CellChanges { changes }), "{bad:?}");
    }
    assert_eq!(patched, after, "nothing is half done");
}

#[test]
fn cells_shrink_and_then_are_shared() {
    for (frames, columns, group, row) in [
        (0, 64, 1, 14),
        (1000, 64, 1, 14),
        (2049, 128, 1, 14),
        (8192, 128, 1, 9),
        (24_066, 256, 1, 6),
        (65_537, 256, 1, 3),
        (70_000, 256, 2, 4),
        (1 << 27, 256, 2048, 3),
    ] {
        let grid = Grid::new(frames);
        let found = (grid.columns, grid.group, grid.row_height());
        assert_eq!(found, (columns, group, row), "{frames} frames give {grid:?}");
        assert!(grid.height() <= 800 && grid.rows * grid.row_frames() >= frames);
        assert_eq!(grid.cell_width() * grid.columns, WIDTH);
    }
}

#[test]
fn equal_neighbours_are_one_strip() {
    let colours = vec![palette::RUN; 2 * 64];
    let strips = Grid::new(128).strips(&colours);
    assert_eq!(strips[&palette::RUN], "M0 .5m0 0h64m-64 1h64");
    assert_eq!(strips.len(), 1);
}

#[test]
fn shared_cells_are_mixed() {
    assert_eq!(palette::mix(&[palette::RUN; 4]), palette::RUN, "one colour stays as it is");
    assert_eq!(palette::mix(&[Colour(0, 0, 255), Colour(120, 0, 255)]), Colour(60, 0, 252));
}

#[test]
fn text_is_escaped_and_nothing_runs() {
    let svg = drawn(frames("0011....#!a."));
    assert!(svg.contains("a &lt;pool&gt; &amp; its"), "{svg}");
    for word in ["<script", "href", "<pool>"] {
        assert!(!svg.contains(word), "{word} in {svg}");
    }
    for word in ["before", "after", "fragmentation", "one note", "free runs of 4", "a cell is a frame"] {
        assert!(svg.contains(word), "no {word:?} in {svg}");
    }
}

#[test]
fn the_legend_names_what_occurs() {
    let words = ["reserved for growth", "evictable", "of no sequence", "in a magazine"];
    let svg = drawn(frames("sse#a...11"));
    words.iter().for_each(|word| assert!(svg.contains(word), "no {word:?} in {svg}"));
    let svg = drawn(frames("........11"));
    words.iter().for_each(|word| assert!(!svg.contains(word), "{word:?} in {svg}"));
}

/// The worst case: no two equal neighbours.
#[test]
fn the_largest_file_is_bounded() {
    let frames = [FrameState::FREE, FrameState::AWAY].into_iter().cycle().take(CELLS_MAX).collect();
    let bytes = drawn(frames).len();
    assert!(bytes < 2 << 20, "{bytes} bytes");
}

#[test]
fn a_picture_of_nothing_is_drawn() {
    assert!(drawn(vec![]).contains("before"));
    let nothing = Picture { title: String::new(), notes: vec![], panels: vec![], groups: vec![] };
    assert!(draw(&nothing).contains("</svg>"));
}

/// What a path draws, cell by cell, read back.
fn painted(path: &str, columns: usize) -> Vec<usize> {
    let mut cells = Vec::new();
    let (mut x, mut y) = (0i64, 0i64);
    for part in path.strip_prefix("M0 .5").expect("a start").split('m').skip(1) {
        let (to, length) = part.split_once('h').expect("a strip");
        let (dx, dy) = to.split_once(' ').expect("two coordinates");
        x += dx.parse::<i64>().unwrap();
        y += dy.parse::<i64>().unwrap();
        let length: i64 = length.parse().unwrap();
        cells.extend((x..x + length).map(|x| y as usize * columns + x as usize));
        x += length;
    }
    cells
}

proptest! {
    /// A view and the changes to another one give the other one.
    #[test]
    fn changes_are_complete(a in "[.a#e!]{40}", b in "[.a#e!]{40}", cells_max in 1usize..60) {
        let cells = |text: &str| Cells::of(&snapshot(frames(text), 1), cells_max);
        let (mut view, after) = (cells(&a), cells(&b));
        let changes = view.changes(&after).unwrap();
        prop_assert!(after.cells.len() <= cells_max * after.group.min(2));
        prop_assert!(view.apply(&changes));
        prop_assert_eq!(view, after);
    }

    /// Every cell is painted once, in its own colour; and the colours agree with the figures.
    #[test]
    fn strips_cover_every_cell_once(text in "[.]{0,9}[.a#!0-9]{1,300}", order in 0u8..5) {
        let snapshot = snapshot(frames(&text), order);
        let grid = Grid::new(text.len());
        let colours = palette::colours(&snapshot, &[]);
        let mut seen = vec![0; text.len()];
        for (colour, path) in grid.strips(&colours) {
            for cell in painted(&path, grid.columns) {
                prop_assert_eq!(colours[cell], colour);
                seen[cell] += 1;
            }
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
        let count = |colour| colours.iter().filter(|&&other| other == colour).count();
        let (runs, fragments, away) = (count(palette::RUN), count(palette::FRAGMENT), count(palette::AWAY));
        prop_assert_eq!(runs, snapshot.free_runs(Order(order)) << order);
        let free = (runs + fragments + away).max(1) as f64;
        prop_assert!((0.0..=1.0).contains(&snapshot.fragmentation(Order(order))));
        // The orders from k on are those of whole runs.
        let shares = draw::shares(&snapshot);
        prop_assert!((shares.iter().sum::<f64>() - (runs + fragments) as f64 / free).abs() < 1e-12);
        let in_runs: f64 = shares.iter().skip(usize::from(order)).sum();
        prop_assert!((in_runs - runs as f64 / free).abs() < 1e-12);
    }
}
