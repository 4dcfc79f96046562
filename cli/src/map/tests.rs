use super::grid::{CELLS_MAX, Grid, WIDTH};
use super::palette::{self, Colour};
use super::*;
use proptest::prelude::*;

/// `.` free, `a` away, `#` owned by nobody, `!` fixed, digits owned by that sequence, in order.
fn frames(text: &str) -> Vec<Frame> {
    let mut places = [0; 10];
    let mut owner = |digit: u32| {
        places[digit as usize] += 1;
        Owner { sequence: u64::from(digit), place: places[digit as usize] - 1 }
    };
    text.chars()
        .map(|char| match char {
            '.' => Frame::Free,
            'a' => Frame::Away,
            '#' => Frame::Movable(None),
            '!' => Frame::Fixed(None),
            digit => Frame::Movable(Some(owner(digit.to_digit(10).expect("a digit")))),
        })
        .collect()
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let owner = prop::option::of((0u64..5, 0u32..9).prop_map(|(sequence, place)| Owner { sequence, place }));
    prop_oneof![
        4 => Just(Frame::Free),
        1 => Just(Frame::Away),
        4 => owner.clone().prop_map(Frame::Movable),
        1 => owner.prop_map(Frame::Fixed),
    ]
}

fn picture(frames: Vec<Frame>) -> Picture {
    let panel = |title: &str| Panel { title: title.to_owned(), frames: frames.clone() };
    Picture {
        title: "a <pool> & its \"runs\"".to_owned(),
        notes: vec!["one note".to_owned()],
        order: 2,
        panels: vec![panel("before"), panel("after")],
    }
}

#[test]
fn figures_of_a_small_pool() {
    //                    0   4   8   12  16
    let figures = Figures::of(&frames("!......#.a..####...."), 2);
    assert_eq!((figures.frames, figures.free), (20, 14));
    assert_eq!(figures.runs, 1, "4..8 is not whole: 7 is owned; 16..20 is");
    assert_eq!(figures.longest_run, 6);
}

/// The same by hand: an aligned run that starts late, frames that are away, an end that is no multiple.
#[test]
fn away_frames_and_ragged_ends_are_in_no_run() {
    let figures = Figures::of(&frames("....a...........#."), 2);
    // 0..4, 8..12, 12..16 are whole; 5, 6, 7 and 17 are crumbs, 4 is away.
    assert_eq!((figures.free, figures.runs), (17, 3));
    assert_eq!(figures.fragmentation, 1.0 / 4.0, "17 frames could be four runs");
    assert_eq!(figures.by_order, [2, 2, 4, 8], "5 and 17; 6..8; 0..4; 8..16");
}

#[test]
fn a_full_pool_is_not_fragmented() {
    let figures = Figures::of(&frames("####"), 2);
    assert_eq!((figures.fragmentation, figures.runs, figures.longest_run), (0.0, 0, 0));
    assert_eq!(figures.sequence_run_mean, 0.0);
}

#[test]
fn runs_of_sequences_break_where_frames_or_places_do_not_follow() {
    assert_eq!(Figures::of(&frames("000111"), 0).sequence_run_mean, 3.0);
    assert_eq!(Figures::of(&frames("001010"), 0).sequence_run_mean, 6.0 / 5.0);
    let backwards = [1, 0].map(|place| Frame::Movable(Some(Owner { sequence: 0, place })));
    assert_eq!(Figures::of(&backwards, 0).sequence_run_mean, 1.0);
    assert_eq!(Figures::of(&frames("00.00#"), 0).sequence_run_mean, 2.0);
}

#[test]
fn tones_tell_runs_from_crumbs() {
    let colours = palette::colours(&frames("....#.a!"), 2);
    assert_eq!(colours[..4], [palette::RUN; 4]);
    assert_eq!(colours[4..], [palette::UNNAMED, palette::CRUMB, palette::AWAY, palette::FIXED]);
    let colours = palette::colours(&frames("1231"), 2);
    assert_eq!(colours[0], colours[3], "a sequence has one shade");
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
    let svg = draw(&picture(frames("0011....#!a.")));
    assert!(svg.contains("a &lt;pool&gt; &amp; its"), "{svg}");
    for word in ["<script", "href", "<pool>"] {
        assert!(!svg.contains(word), "{word} in {svg}");
    }
    for word in ["before", "after", "fragmentation", "one note", "free runs of 4", "a cell is a frame"] {
        assert!(svg.contains(word), "no {word:?} in {svg}");
    }
}

/// The worst that a pool can look like: no two neighbours alike.
#[test]
fn the_largest_file_is_bounded() {
    let panel = Panel {
        title: String::new(),
        frames: (0..CELLS_MAX).map(|at| if at % 2 == 0 { Frame::Free } else { Frame::Away }).collect(),
    };
    let bytes = draw(&Picture { panels: vec![panel.clone(), panel], ..picture(vec![]) }).len();
    assert!(bytes < 2 << 20, "{bytes} bytes");
}

#[test]
fn a_picture_of_nothing_is_drawn() {
    assert!(draw(&picture(vec![])).contains("before"));
    assert!(draw(&Picture { panels: vec![], ..picture(vec![]) }).contains("</svg>"));
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
    /// Every cell is painted once, in its own colour.
    #[test]
    fn strips_cover_every_cell_once(frames in prop::collection::vec(any_frame(), 1..300)) {
        let grid = Grid::new(frames.len());
        let colours = palette::colours(&frames, 2);
        let mut seen = vec![0; frames.len()];
        for (colour, path) in grid.strips(&colours) {
            for cell in painted(&path, grid.columns) {
                prop_assert_eq!(colours[cell], colour);
                seen[cell] += 1;
            }
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
    }

    /// Figures against the definition, frame by frame.
    #[test]
    fn figures_are_as_defined(frames in prop::collection::vec(any_frame(), 0..200), order in 0u8..5) {
        let figures = Figures::of(&frames, order);
        let whole = frames
            .chunks_exact(1 << order)
            .filter(|chunk| chunk.iter().all(|&frame| frame == Frame::Free))
            .count();
        prop_assert_eq!(figures.runs, whole);
        let free = frames.iter().filter(|frame| frame.is_free()).count();
        prop_assert_eq!(figures.free, free);
        let first = usize::from(frames.first() == Some(&Frame::Fixed(None)));
        let places = (frames.len() >> order).saturating_sub(first);
        let could_be = places.min(free >> order);
        let share = if could_be == 0 { 0.0 } else { 1.0 - whole as f64 / could_be as f64 };
        prop_assert!((figures.fragmentation - share).abs() < 1e-12);
        let had = frames.iter().filter(|&&frame| frame == Frame::Free).count();
        prop_assert_eq!(figures.by_order.iter().sum::<usize>(), had);
        // Sum over orders from k on: what lies in whole runs.
        let in_runs: usize = figures.by_order.iter().skip(usize::from(order)).sum();
        prop_assert_eq!(in_runs, whole << order);
        let reds = palette::colours(&frames, order).iter().filter(|&&colour| colour == palette::CRUMB).count();
        prop_assert_eq!(reds, had - (whole << order));
    }
}
