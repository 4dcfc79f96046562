//! Curves as SVG, and hit rates as curves: one panel per trace, one line per policy, capacities on a
//! logarithmic scale.

use svg::Document;
use svg::node::element::{Circle, Group, Line, Polyline, Rectangle, Text, Title};

use super::chart::percent;
use super::{Contender, Rate, Rates};

const WIDTH: f64 = 860.0;
const PANEL: f64 = 420.0;
const LEFT: f64 = 70.0;
/// Space for the names at the ends of lines.
const RIGHT: f64 = 130.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 50.0;
/// The least distance between two names.
const NAME: f64 = 17.0;

const INK: &str = "#1f2933";
const FAINT: &str = "#5b6774";
const RULE: &str = "#d9dfe4";
const SUBJECT: &str = "#e6550d";
const BOUND: &str = "#9aa5b1";
/// Colours of the other policies, distinguishable with the common colour deficiencies.
const OTHERS: [&str; 4] = ["#1c4f80", "#5f9fd6", "#117733", "#882255"];
const FONT: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";

/// A panel of a picture. Places are from 0 to 1, from the left and from below.
#[derive(Clone, PartialEq, Debug)]
pub struct Panel {
    /// The title.
    pub title: String,
    /// What the axes show.
    pub note: String,
    /// Labels of the horizontal axis, with their places.
    pub columns: Vec<(f64, String)>,
    /// Labels of the vertical axis, with their places.
    pub rows: Vec<(f64, String)>,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// A curve of a [`Panel`].
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    /// The name at its end.
    pub name: String,
    /// How it looks.
    pub look: Look,
    /// The places of its points.
    pub points: Vec<(f64, f64)>,
}

/// The look of a [`Curve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// The subject of the picture.
    Subject,
    /// A bound of all others.
    Bound,
    /// One of the others.
    Other,
}

/// Renders the rates of traces, each with its name, as an SVG document.
pub fn draw(traces: &[(String, Rates)]) -> String {
    let panels: Vec<_> = traces.iter().map(|(name, rates)| of_rates(name, rates)).collect();
    picture("Hit rates of eviction policies", &panels)
}

/// Renders panels, one below the other, as an SVG document.
pub fn picture(title: &str, panels: &[Panel]) -> String {
    let height = PANEL * panels.len() as f64;
    let mut document = Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("font-family", FONT)
        .set("font-size", 14)
        .set("fill", INK)
        .add(Title::new(title))
        .add(Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "#ffffff"));
    for (index, panel) in panels.iter().enumerate() {
        let at = format!("translate(0 {})", PANEL * index as f64);
        document = document.add(group(panel).set("transform", at));
    }
    document.to_string()
}

/// Returns the panel of a trace, with capacities on a logarithmic scale.
fn of_rates(name: &str, rates: &[Vec<Rate>]) -> Panel {
    let all = || rates.iter().flatten();
    let shares = all().map(|rate| rate.share.ln());
    let (low, high) =
        shares.fold((f64::MAX, f64::MIN), |(low, high), share| (low.min(share), high.max(share)));
    let along = |share: f64| if high > low { (share.ln() - low) / (high - low) } else { 0.5 };
    let highest = all().map(|rate| rate.hit_rate).fold(0.0, f64::max);
    let rate_max = ((highest * 10.0).ceil() / 10.0).max(0.1);
    let curve = |policy: &Vec<Rate>| {
        let contender = policy.last()?.contender;
        let look = match contender {
            Contender::Clairvoyant => Look::Bound,
            _ => Look::Other,
        };
        let points = policy.iter().map(|rate| (along(rate.share), rate.hit_rate / rate_max)).collect();
        Some(Curve { name: contender.name().to_owned(), look, points })
    };
    let columns = rates.first().into_iter().flatten().map(|rate| (along(rate.share), percent(rate.share)));
    Panel {
        title: name.to_owned(),
        note: "hit rate by capacity, as a share of the distinct blocks".to_owned(),
        columns: columns.collect(),
        rows: (0..=5)
            .map(f64::from)
            .map(|step| (step / 5.0, format!("{:.2}", rate_max * step / 5.0)))
            .collect(),
        curves: rates.iter().filter_map(curve).collect(),
    }
}

fn group(panel: &Panel) -> Group {
    let x = |along: f64| LEFT + along * (WIDTH - LEFT - RIGHT);
    let y = |up: f64| PANEL - BOTTOM - up * (PANEL - TOP - BOTTOM);
    let mut group = Group::new()
        .add(text(LEFT, 26.0, &panel.title).set("font-weight", 700).set("font-size", 17))
        .add(faint(text(LEFT, 46.0, &panel.note)));
    for (up, label) in &panel.rows {
        let y = y(*up);
        group = group
            .add(line((LEFT, y), (WIDTH - RIGHT, y)).set("stroke", RULE))
            .add(faint(text(LEFT - 8.0, y + 5.0, label)).set("text-anchor", "end"));
    }
    for (along, label) in &panel.columns {
        let label = text(x(*along), PANEL - BOTTOM + 22.0, label);
        group = group.add(faint(label).set("text-anchor", "middle"));
    }
    let mut others = OTHERS.into_iter().cycle();
    let mut ends: Vec<(f64, &str, &str)> = Vec::new();
    for curve in &panel.curves {
        let Some(&(_, last)) = curve.points.last() else { continue };
        let (colour, width) = match curve.look {
            Look::Subject => (SUBJECT, 3.0),
            Look::Bound => (BOUND, 1.5),
            Look::Other => (others.next().unwrap_or(INK), 1.5),
        };
        let at = |&(along, up): &(f64, f64)| (x(along), y(up));
        let points: Vec<String> =
            curve.points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        group = group.add(
            Polyline::new()
                .set("points", points.join(" "))
                .set("fill", "none")
                .set("stroke", colour)
                .set("stroke-width", width),
        );
        for (x, y) in curve.points.iter().map(at) {
            group = group.add(
                Circle::new()
                    .set("cx", format!("{x:.1}"))
                    .set("cy", format!("{y:.1}"))
                    .set("r", width + 1.0)
                    .set("fill", colour),
            );
        }
        ends.push((y(last), colour, &curve.name));
    }
    // Names from the top down, without overlaps.
    ends.sort_by(|(a, ..), (b, ..)| a.total_cmp(b));
    let mut lowest = f64::MIN;
    for (y, colour, name) in ends {
        lowest = y.max(lowest + NAME);
        group = group.add(text(WIDTH - RIGHT + 12.0, lowest + 5.0, name).set("fill", colour));
    }
    group
}

fn text(x: f64, y: f64, content: &str) -> Text {
    Text::new(content).set("x", format!("{x:.1}")).set("y", format!("{y:.1}"))
}

fn faint(text: Text) -> Text {
    text.set("fill", FAINT)
}

fn line((x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> Line {
    let number = |value: f64| format!("{value:.1}");
    Line::new().set("x1", number(x1)).set("y1", number(y1)).set("x2", number(x2)).set("y2", number(y2))
}
