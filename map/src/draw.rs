//! The sheet: title, legend, and for each panel its figures, its frames and its bars.

use kvpool::compact::{FrameKind, Snapshot};
use svg::Document;
use svg::node::element::{Group, Path, Rectangle, Text, Title};

use super::Picture;
use super::class;
use super::grid::{Grid, WIDTH};
use super::palette::{self, Colour};

const MARGIN: usize = 20;
const GAP: usize = 24;

const PAPER: &str = "#ffffff";
const INK: Colour = Colour(0x1f, 0x29, 0x33);
const FAINT: Colour = Colour(0x5b, 0x67, 0x74);
const RULE: Colour = Colour(0xc9, 0xd1, 0xd9);
const FONT: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";

/// Heights of the parts above and below the frames of a panel, in pixels.
const NOTE: usize = 22;
const LEGEND: usize = 44;
/// Height of each further row of the legend.
const LEGEND_ROW: usize = 26;
const TILES: usize = 98;
const BARS: usize = 186;
const BAR_MAX: f64 = 84.0;

/// Renders the picture as an SVG document.
pub fn draw(picture: &Picture<'_>) -> String {
    let frames = picture.panels.iter().map(|(_, snapshot)| snapshot.frames().len()).max().unwrap_or(0);
    let grid = Grid::new(frames);
    let panels = picture.panels.len().max(1);
    let width = 2 * MARGIN + panels * WIDTH + (panels - 1) * GAP;
    let notes_y = MARGIN + 36;
    let legend_y = notes_y + picture.notes.len() * NOTE + 12;
    // Each walk over a million frames takes a while: once.
    let colours: Vec<Vec<Colour>> =
        picture.panels.iter().map(|(_, snapshot)| palette::colours(snapshot, &picture.groups)).collect();
    let legend_entries = entries(picture, &colours, width - 2 * MARGIN);
    let rows_more = legend_entries.last().map_or(0, |entry| entry.row);
    let panels_y = legend_y + LEGEND + rows_more * LEGEND_ROW;
    let height = panels_y + TILES + grid.height() + BARS + MARGIN;

    let mut document = Document::new()
        .set("viewBox", (0, 0, width, height))
        .set("width", width)
        .set("height", height)
        .set("font-family", FONT)
        .set("fill", INK.to_string())
        .add(Title::new(picture.title.as_str()))
        .add(rectangle(0, 0, width, height).set("fill", PAPER))
        .add(text(MARGIN, MARGIN + 24, 26, &picture.title).set("font-weight", 700));
    for (index, note) in picture.notes.iter().enumerate() {
        document = document.add(faint(text(MARGIN, notes_y + 14 + index * NOTE, 15, note)));
    }
    document = document.add(legend(&legend_entries, legend_y));
    let shares: Vec<Vec<f64>> = picture.panels.iter().map(|(_, snapshot)| shares(snapshot)).collect();
    let share_max = shares.iter().flatten().copied().fold(0.0, f64::max);
    for (index, (&(title, snapshot), colours)) in picture.panels.iter().zip(&colours).enumerate() {
        let x = MARGIN + index * (WIDTH + GAP);
        let panel = panel(title, snapshot, grid, colours, (&shares[index], share_max));
        document = document.add(panel.set("transform", format!("translate({x} {panels_y})")));
    }
    document.to_string()
}

fn panel(
    title: &str,
    snapshot: &Snapshot,
    grid: Grid,
    colours: &[Colour],
    (shares, share_max): (&[f64], f64),
) -> Group {
    let strips = grid.strips(colours);
    // High rows are separated by a line of one pixel below each.
    let row = grid.row_height();
    let line = usize::from(row >= 5);
    let top = TILES as f64 - line as f64 / 2.0;
    let mut cells = Group::new()
        .set("transform", format!("translate(0 {top}) scale({} {row})", grid.cell_width()))
        .set("fill", "none")
        .set("stroke-width", format!("{:.4}", (row - line) as f64 / row as f64))
        .set("shape-rendering", "crispEdges");
    for (colour, path) in strips {
        cells = cells.add(Path::new().set("stroke", colour.to_string()).set("d", path));
    }
    Group::new()
        .add(text(0, 18, 19, title).set("font-weight", 700))
        .add(tiles(snapshot))
        .add(cells)
        .add(outline(0, TILES, WIDTH, grid.height()))
        .add(faint(text(0, TILES + grid.height() + 18, 13, &layout(grid))))
        .add(
            bars(shares, snapshot.order().0, share_max)
                .set("transform", format!("translate(0 {})", TILES + grid.height())),
        )
}

/// Draws the figures of a panel.
fn tiles(snapshot: &Snapshot) -> Group {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let order = snapshot.order();
    let fragmentation = snapshot.fragmentation(order);
    let longest = snapshot.longest_free_run().map_or(0, |run| run.len as usize);
    let mut all = vec![
        (percent(fragmentation), "fragmentation".to_owned()),
        (count(snapshot.free_runs(order)), format!("free runs of {}", order.frames())),
        (count(longest), "longest free".to_owned()),
        (format!("{:.1}", snapshot.mean_sequence_run()), "mean run".to_owned()),
        (percent(free(snapshot) as f64 / snapshot.frames().len().max(1) as f64), "free".to_owned()),
    ];
    let [reserved_for_growth, evictable] =
        [FrameKind::ReservedForGrowth, FrameKind::Evictable].map(|kind| snapshot.count(kind));
    if evictable > 0 {
        all.insert(1, (percent(snapshot.available_fragmentation(order)), "with evictable".to_owned()));
    }
    for (count, caption) in [(reserved_for_growth, "reserved for growth"), (evictable, "evictable")] {
        let share = count as f64 / snapshot.frames().len().max(1) as f64;
        if share > 0.0 {
            all.push((percent(share), caption.to_owned()));
        }
    }
    let width = WIDTH / all.len();
    // Eight figures and their captions just fit.
    let (figure_size, caption_size) = if all.len() > 6 { (21, 12) } else { (25, 13) };
    let mut group = Group::new();
    for (index, (figure, caption)) in all.iter().enumerate() {
        let x = index * width;
        // The first figure is the subject of the picture.
        let colour = if index == 0 && fragmentation >= 0.1 { palette::FRAGMENT } else { INK };
        group = group
            .add(text(x, 54, figure_size, figure).set("font-weight", 600).set("fill", colour.to_string()))
            .add(faint(text(x, 74, caption_size, caption)));
    }
    group
}

/// Returns the number of free frames, also those that are reserved for growth or away.
fn free(snapshot: &Snapshot) -> usize {
    [FrameKind::Free, FrameKind::ReservedForGrowth, FrameKind::Away]
        .map(|kind| snapshot.count(kind))
        .iter()
        .sum()
}

/// Returns the shares of the free frames by the order of the aligned run that they are in, when
/// every free run is cut into as few as possible.
pub(super) fn shares(snapshot: &Snapshot) -> Vec<f64> {
    /// Orders that are always shown, so that panels are comparable.
    const ORDERS: usize = 14;
    let (mut frames, mut at) = (vec![0usize; ORDERS], 0);
    for piece in snapshot.frames().chunk_by(|a, b| a.kind().is_free() == b.kind().is_free()) {
        let end = at + piece.len();
        while piece[0].kind().is_free() && at < end {
            let order = at.trailing_zeros().min((end - at).ilog2()) as usize;
            frames.resize(frames.len().max(order + 1), 0);
            frames[order] += 1 << order;
            at += 1 << order;
        }
        at = end;
    }
    let free = free(snapshot).max(1) as f64;
    frames.into_iter().map(|frames| frames as f64 / free).collect()
}

/// Draws the shares of free frames.
fn bars(shares: &[f64], order: u8, share_max: f64) -> Group {
    let orders = shares.len();
    let width = WIDTH as f64 / orders as f64;
    let base = 64.0 + BAR_MAX;
    let number = |value: f64| format!("{value:.1}");
    let mut group = Group::new();
    for (index, &share) in shares.iter().enumerate() {
        let height = if share_max > 0.0 { share / share_max * BAR_MAX } else { 0.0 };
        let x = width * index as f64;
        let (fill, edge) = if index < usize::from(order) {
            (palette::FRAGMENT, palette::FRAGMENT)
        } else {
            (palette::RUN, Colour(0x7f, 0xbf, 0x98))
        };
        let caption = |y: String, content: &str| {
            let text = faint(text(0, 0, 11, content)).set("x", number(x + width / 2.0));
            text.set("y", y).set("text-anchor", "middle")
        };
        if share > 0.0 {
            let bar = Rectangle::new()
                .set("x", number(x + 4.0))
                .set("y", number(base - height))
                .set("width", number(width - 8.0))
                .set("height", number(height.max(1.0)))
                .set("fill", fill.to_string())
                .set("stroke", edge.to_string());
            let percent = format!("{:.1} %", 100.0 * share);
            group = group.add(bar).add(caption(number(base - height - 4.0), &percent));
        }
        group = group.add(caption((base + 15.0).to_string(), &count(1 << index)));
    }
    let caption = "Free frames, by the length of the aligned free run that they are in.";
    group
        .add(
            Path::new()
                .set("d", format!("M0 {base}.5h{WIDTH}"))
                .set("stroke", RULE.to_string())
                .set("shape-rendering", "crispEdges"),
        )
        .add(faint(text(0, base as usize + 34, 13, caption)))
}

/// An entry of the legend: its colours, its caption, and its place.
struct Entry {
    colours: Vec<Colour>,
    caption: String,
    x: usize,
    row: usize,
}

/// Returns the legend of the colours, in rows that fit into this width.
fn entries(picture: &Picture<'_>, colours: &[Vec<Colour>], width: usize) -> Vec<Entry> {
    let run = picture.panels.first().map_or(1, |(_, snapshot)| snapshot.order().frames());
    let mut all: Vec<(&[Colour], String)> = vec![
        (&[palette::RUN], format!("free, in a whole run of {run}")),
        (&[palette::FRAGMENT], "free, a fragment".to_owned()),
        (&[palette::RESERVED_FOR_GROWTH], "free, reserved for growth".to_owned()),
        (&[palette::AWAY], "free, in a magazine or retired".to_owned()),
    ];
    for (number, group) in picture.groups.iter().enumerate() {
        let shade = usize::from(class::shade_of_group(number));
        all.push((&palette::SHADES[shade..=shade], format!("owned, {}", group.caption)));
    }
    if picture.groups.is_empty() {
        all.push((&palette::SHADES, "owned, a shade for each sequence".to_owned()));
    }
    let fixed = if picture.groups.is_empty() { "open or pinned" } else { "open, pinned, or of a state" };
    all.extend([
        (&[palette::UNNAMED][..], "owned, of no sequence".to_owned()),
        (&[palette::EVICTABLE], "evictable".to_owned()),
        (&[palette::FIXED], fixed.to_owned()),
    ]);
    let (mut x, mut row, mut placed) = (0, 0, Vec::new());
    for (entry, caption) in all {
        let is_optional = matches!(
            entry[0],
            palette::RESERVED_FOR_GROWTH | palette::AWAY | palette::UNNAMED | palette::EVICTABLE
        );
        if is_optional && !colours.iter().any(|panel| panel.contains(&entry[0])) {
            continue;
        }
        // The approximate width of the caption, without access to a font.
        let wide = swatch(entry) * entry.len() + 7 + caption.len() * 15 / 2;
        if x > 0 && x + wide > width {
            (x, row) = (0, row + 1);
        }
        placed.push(Entry { colours: entry.to_vec(), caption, x, row });
        x += wide + 24;
    }
    placed
}

/// Returns the width of each colour of an entry.
fn swatch(colours: &[Colour]) -> usize {
    if colours.len() == 1 { 18 } else { 9 }
}

/// Draws the legend.
fn legend(entries: &[Entry], y: usize) -> Group {
    let mut group = Group::new().set("transform", format!("translate({MARGIN} {y})"));
    for Entry { colours, caption, x, row } in entries {
        let (swatch, top) = (swatch(colours), row * LEGEND_ROW);
        let mut at = *x;
        for colour in colours {
            group = group.add(rectangle(at, top, swatch, 18).set("fill", colour.to_string()));
            at += swatch;
        }
        group =
            group.add(outline(*x, top, swatch * colours.len(), 18)).add(text(at + 7, top + 14, 14, caption));
    }
    group
}

/// Describes the layout of the frames.
fn layout(grid: Grid) -> String {
    let cell = match grid.group {
        1 => "a cell is a frame".to_owned(),
        group => format!("a cell is {group} frames, in the mean of their colours"),
    };
    format!("By address, {} frames a row; {cell}.", count(grid.row_frames()))
}

/// Returns a number with its digits in groups of three.
fn count(value: usize) -> String {
    let digits = value.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

fn text(x: usize, y: usize, size: usize, content: &str) -> Text {
    Text::new(content).set("x", x).set("y", y).set("font-size", size)
}

fn faint(text: Text) -> Text {
    text.set("fill", FAINT.to_string())
}

fn rectangle(x: usize, y: usize, width: usize, height: usize) -> Rectangle {
    Rectangle::new().set("x", x).set("y", y).set("width", width).set("height", height)
}

fn outline(x: usize, y: usize, width: usize, height: usize) -> Rectangle {
    rectangle(x, y, width, height).set("fill", "none").set("stroke", RULE.to_string())
}
