//! The report as a table for a terminal: a section a row, figures aligned, notes beside them. Figures
//! are read from the JSON by their names, and labelled with these names as words.

use comfy_table::modifiers::UTF8_ROUND_CORNERS;
use comfy_table::presets::UTF8_FULL;
use comfy_table::{Attribute, Cell, CellAlignment, Color};
use indicatif::{BinaryBytes, HumanCount};
use serde_json::Value;

use super::Report;
use crate::output;
use crate::replay::{Durations, Resize};

/// The name of a figure in the JSON, and a note.
type Row = (&'static str, String);

/// Renders the whole table.
pub fn render(report: &Report) -> String {
    let json = serde_json::to_value(report).expect("numbers and texts");
    let mut table = output::table(UTF8_FULL);
    table.apply_modifier(UTF8_ROUND_CORNERS);
    for (section, rows) in sections(report) {
        let (mut names, mut figures, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (name, note)) in rows.into_iter().enumerate() {
            let object = match json.get(section) {
                Some(Value::Array(items)) => &items[index],
                Some(object @ Value::Object(_)) => object,
                _ => &json,
            };
            names.push(label(name));
            figures.push(figure(name, object.get(name).expect("a name of the JSON")));
            notes.push(note);
        }
        match json.get(section) {
            Some(Value::Null) => (names, figures) = (vec!["off".to_owned()], vec!["-".to_owned()]),
            _ if names.is_empty() => continue,
            _ => {}
        }
        table.add_row([
            Cell::new(label(section)).add_attribute(Attribute::Bold),
            Cell::new(names.join("\n")),
            Cell::new(figures.join("\n")).set_alignment(CellAlignment::Right),
            Cell::new(notes.join("\n")).add_attribute(Attribute::Dim),
        ]);
    }
    let (colour, verdict) = verdict(report);
    format!("{}\n{table}\n{}", heading(report), verdict_line(colour, &verdict))
}

/// Returns the rows by section. A section named like an object of the JSON has figures of that object;
/// one named like a list, a figure of each of its objects; any other, figures of the report itself.
fn sections(report: &Report) -> [(&'static str, Vec<Row>); 10] {
    let plain = |name| (name, String::new());
    let seconds = report.wall_s.max(f64::MIN_POSITIVE);
    let written = format!("written, {:.1} million a second", report.tokens as f64 / seconds / 1e6);
    let [checked, corrupt] = match report.tokens_verified {
        0 => ["not verified"; 2],
        _ => ["read back and compared", ""],
    };
    let pool_bytes = BinaryBytes(report.block_bytes * report.blocks_total as u64);
    let refused = match report.utilization.at_first_refusal {
        Some(_) => format!("refused {} times", HumanCount(report.refused)),
        None => "nothing was refused".to_owned(),
    };
    let prefix = report.prefix.iter().flat_map(|prefix| {
        let [hits, lookups, resumed] =
            [prefix.hit_blocks, prefix.lookup_blocks, prefix.resumed_lookup_blocks].map(HumanCount);
        let resumed = ("resumed_hit_blocks", format!("of {resumed} blocks of preempted requests"));
        [
            ("hit_rate", format!("{hits} of {lookups} blocks of prompts")),
            ("evicted_blocks", format!("by policy {}", prefix.policy)),
        ]
        .into_iter()
        .chain((prefix.resumed_lookup_blocks > 0).then_some(resumed))
    });
    let defrag = report.defrag.iter().flat_map(|defrag| {
        let mean = defrag.time_ms / defrag.runs.max(1) as f64;
        let shares =
            ["fragmentation_before", "fragmentation_after"].map(|name| (name, "a run, on average".into()));
        let always = [
            plain("runs"),
            ("time_ms", format!("{mean:.2} ms a run")),
            ("moved_blocks", BinaryBytes(defrag.moved_bytes).to_string()),
            ("given_up", "moves cancelled by a concurrent use".into()),
        ];
        let errors = defrag.errors.iter().map(|error| ("errors", error.clone()));
        always.into_iter().chain(shares.into_iter().take(if defrag.runs > 0 { 2 } else { 0 })).chain(errors)
    });
    [
        (
            "requests",
            vec![
                ("completed", format!("of {}", HumanCount(report.requests))),
                ("rejected", "larger than the pool".into()),
                ("preempted", "started over later".into()),
            ],
        ),
        (
            "time",
            vec![
                plain("wall_s"),
                ("trace_s", "first arrival to last".into()),
                ("speedup", "real time".into()),
            ],
        ),
        ("tokens", vec![("tokens", written), ("tokens_verified", checked.into())]),
        (
            "blocks",
            vec![
                ("blocks_total", format!("of {} tokens, {pool_bytes} in all", report.block_tokens)),
                plain("blocks_allocated"),
                plain("blocks_freed"),
                plain("blocks_leaked"),
                ("blocks_corrupt", corrupt.into()),
                ("run_len_mean", "blocks in a row, of a sequence when it ends".into()),
            ],
        ),
        ("prefix", prefix.collect()),
        (
            "utilization",
            vec![
                ("mean", "of blocks, over virtual time".into()),
                plain("peak"),
                ("at_first_refusal", refused),
            ],
        ),
        (
            "fragmentation",
            vec![
                ("mean", "of free blocks, outside long runs".into()),
                plain("max"),
                ("final", "all blocks free".into()),
            ],
        ),
        ("defrag", defrag.collect()),
        ("resize", report.resize.iter().map(|step| ("to", resize(step))).collect()),
        (
            "latency_ns",
            vec![
                ("allocate", quantiles(&report.latency_ns.allocate)),
                ("free", quantiles(&report.latency_ns.free)),
            ],
        ),
    ]
}

/// A figure with its unit.
fn figure(name: &str, value: &Value) -> String {
    match (value.as_u64(), value.as_f64(), name) {
        (Some(count), ..) => HumanCount(count).to_string(),
        (_, Some(figure), "wall_s") => format!("{figure:.2} s"),
        (_, Some(figure), "trace_s") => format!("{figure:.0} s"),
        (_, Some(figure), "time_ms") => format!("{figure:.1} ms"),
        (_, Some(figure), "speedup") => format!("{} x", HumanCount(figure.round() as u64)),
        (_, Some(figure), "run_len_mean") => format!("{figure:.1}"),
        (_, Some(share), _) => format!("{:.1} %", share * 100.0),
        _ => value["p50"].as_u64().map_or("-".to_owned(), duration),
    }
}

/// A name of the JSON as words. The unit stands beside the figure.
fn label(name: &str) -> String {
    let unit = ["_s", "_ms", "_ns"].into_iter().find_map(|unit| name.strip_suffix(unit));
    unit.unwrap_or(name).replace('_', " ")
}

fn verdict(report: &Report) -> (Color, String) {
    let checked =
        if report.verify { "nothing lost, nothing corrupt" } else { "nothing lost; no token was read back" };
    if report.interrupted && report.intact {
        let settled = HumanCount(report.completed + report.rejected);
        let all = HumanCount(report.requests);
        (Color::Yellow, format!("INTERRUPTED after {settled} of {all} requests; until then {checked}"))
    } else if report.sound {
        (Color::Green, checked.to_owned())
    } else {
        (Color::Red, unsound(report))
    }
}

fn heading(report: &Report) -> String {
    let threads =
        if report.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", report.threads) };
    format!("{} on {threads}, layout {}", report.trace, report.layout)
}

/// Coloured by the same rules as the table: only on a terminal.
fn verdict_line(colour: Color, verdict: &str) -> String {
    let mut line = output::table(comfy_table::presets::NOTHING);
    line.add_row([Cell::new(verdict).fg(colour).add_attribute(Attribute::Bold)]);
    line.to_string()
}

fn unsound(report: &Report) -> String {
    let mut all = Vec::new();
    let unsettled = if report.interrupted { 0 } else { report.requests - report.completed - report.rejected };
    for (count, what) in [
        (unsettled, "requests never done"),
        (report.blocks_leaked, "blocks leaked"),
        (report.blocks_allocated.abs_diff(report.blocks_freed), "blocks not given back"),
        (report.blocks_corrupt, "blocks corrupt"),
    ] {
        if count > 0 {
            all.push(format!("{} {what}", HumanCount(count)));
        }
    }
    if report.audit != "ok" {
        all.push(format!("audit: {}", report.audit));
    }
    all.extend(report.findings.iter().cloned());
    format!("NOT SOUND\n{}", all.join("\n"))
}

fn resize(step: &Resize) -> String {
    let outcome = step.outcome.as_ref().err().map_or("done".to_owned(), ToString::to_string);
    let tries =
        if step.attempts == 1 { "1 try" } else { &format!("{} tries", HumanCount(step.attempts.into())) };
    let [from, at] = [step.from as u64, step.at_request].map(HumanCount);
    format!("from {from} at request {at}: {outcome}, {tries}, {:.1} ms", step.time_ms)
}

fn quantiles(durations: &Durations) -> String {
    let [_, p99, p999, max] = durations.quantiles_ns().map(|(_, ns)| duration(ns));
    format!("p50; p99 {p99}, p99.9 {p999}, max {max}")
}

fn duration(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        _ => format!("{:.1} ms", ns as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::ResizeRefusal;

    #[test]
    fn durations_have_units_that_fit() {
        assert_eq!([7, 9_999, 10_000, 12_345_678].map(duration), ["7 ns", "9999 ns", "10.0 us", "12.3 ms"]);
    }

    #[test]
    fn figures_have_units() {
        for (name, value, text) in [
            ("tokens", Value::from(12_031), "12,031"),
            ("hit_rate", Value::from(0.9912), "99.1 %"),
            ("time_ms", Value::from(0.04), "0.0 ms"),
            ("speedup", Value::from(1234.5), "1,235 x"),
            ("at_first_refusal", Value::Null, "-"),
        ] {
            assert_eq!(figure(name, &value), text, "{name}");
        }
    }

    #[test]
    fn the_note_of_a_resize_has_its_outcome() {
        let refusal = ResizeRefusal::Blocked("1 block is in the way: b7 pinned".into());
        let (from, to, at_request) = (40_000, 14_000, 12_000);
        let step = Resize { at_request, from, to, time_ms: 1234.56, attempts: 3, outcome: Err(refusal) };
        let note =
            "from 40,000 at request 12,000: blocked: 1 block is in the way: b7 pinned, 3 tries, 1234.6 ms";
        assert_eq!(resize(&step), note);
        let done = Resize { attempts: 1, outcome: Ok(()), time_ms: 0.04, ..step };
        assert_eq!(resize(&done), "from 40,000 at request 12,000: done, 1 try, 0.0 ms");
    }
}
