//! Hit rates as SVG: one panel per trace, one line per policy, capacities on a logarithmic scale.

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
const FORESIGHT: &str = "#e6550d";
const BOUND: &str = "#9aa5b1";
/// Colours of the other policies, distinguishable with the common colour deficiencies.
const OTHERS: [&str; 4] = ["#1c4f80", "#5f9fd6", "#117733", "#882255"];
const FONT: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";

/// Renders the rates of traces, each with its name, as an SVG document.
pub fn draw(traces: &[(String, Rates)]) -> String {
    let height = PANEL * traces.len() as f64;
    let mut document = Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("font-family", FONT)
        .set("font-size", 14)
        .set("fill", INK)
        .add(Title::new("Hit rates of eviction policies"))
        .add(Rectangle::new().set("width", WIDTH).set("height", height).set("fill", "#ffffff"));
    for (index, (name, rates)) in traces.iter().enumerate() {
        let at = format!("translate(0 {})", PANEL * index as f64);
        document = document.add(panel(name, rates).set("transform", at));
    }
    document.to_string()
}

/// The scales of a panel.
struct Scale {
    shares: (f64, f64),
    rate_max: f64,
}

impl Scale {
    fn new(rates: &[Vec<Rate>]) -> Self {
        let all = || rates.iter().flatten();
        let shares = all().map(|rate| rate.share.ln());
        let (low, high) =
            shares.fold((f64::MAX, f64::MIN), |(low, high), share| (low.min(share), high.max(share)));
        let highest = all().map(|rate| rate.hit_rate).fold(0.0, f64::max);
        Self { shares: (low, high), rate_max: ((highest * 10.0).ceil() / 10.0).max(0.1) }
    }

    fn x(&self, share: f64) -> f64 {
        let (low, high) = self.shares;
        let along = if high > low { (share.ln() - low) / (high - low) } else { 0.5 };
        LEFT + along * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, rate: f64) -> f64 {
        PANEL - BOTTOM - rate / self.rate_max * (PANEL - TOP - BOTTOM)
    }
}

fn panel(name: &str, rates: &[Vec<Rate>]) -> Group {
    let scale = Scale::new(rates);
    let mut group = Group::new()
        .add(text(LEFT, 26.0, name).set("font-weight", 700).set("font-size", 17))
        .add(faint(text(LEFT, 46.0, "hit rate by capacity, as a share of the distinct blocks")));
    for step in 0..=5 {
        let rate = scale.rate_max * f64::from(step) / 5.0;
        let y = scale.y(rate);
        group = group
            .add(line((LEFT, y), (WIDTH - RIGHT, y)).set("stroke", RULE))
            .add(faint(text(LEFT - 8.0, y + 5.0, &format!("{rate:.2}"))).set("text-anchor", "end"));
    }
    for rate in rates.first().into_iter().flatten() {
        let label = text(scale.x(rate.share), PANEL - BOTTOM + 22.0, &percent(rate.share));
        group = group.add(faint(label).set("text-anchor", "middle"));
    }
    let mut others = OTHERS.into_iter().cycle();
    let mut ends: Vec<(f64, &str, Contender)> = Vec::new();
    for policy in rates {
        let Some(last) = policy.last() else { continue };
        let (colour, width) = match last.contender {
            Contender::FORESIGHT => (FORESIGHT, 3.0),
            Contender::Clairvoyant => (BOUND, 1.5),
            _ => (others.next().unwrap_or(INK), 1.5),
        };
        let at = |rate: &Rate| (scale.x(rate.share), scale.y(rate.hit_rate));
        let points: Vec<String> = policy.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        group = group.add(
            Polyline::new()
                .set("points", points.join(" "))
                .set("fill", "none")
                .set("stroke", colour)
                .set("stroke-width", width),
        );
        for (x, y) in policy.iter().map(at) {
            group = group.add(
                Circle::new()
                    .set("cx", format!("{x:.1}"))
                    .set("cy", format!("{y:.1}"))
                    .set("r", width + 1.0)
                    .set("fill", colour),
            );
        }
        ends.push((scale.y(last.hit_rate), colour, last.contender));
    }
    // Names from the top down, without overlaps.
    ends.sort_by(|(a, ..), (b, ..)| a.total_cmp(b));
    let mut lowest = f64::MIN;
    for (y, colour, contender) in ends {
        lowest = y.max(lowest + NAME);
        group = group.add(text(WIDTH - RIGHT + 12.0, lowest + 5.0, contender.name()).set("fill", colour));
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
