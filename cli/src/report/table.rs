//! The report as a table for a terminal: a section a row, figures aligned, units beside them.
//! Sections and figures have the names that they have in the JSON, without underscores and units.

use comfy_table::modifiers::UTF8_ROUND_CORNERS;
use comfy_table::presets::UTF8_FULL;
use comfy_table::{Attribute, Cell, CellAlignment, Color};
use indicatif::{BinaryBytes, HumanCount};

use super::{Latency, Report, ResizeStep};
use crate::output;

/// What, by its name in the JSON; how much; and what to know about it.
type Line = (&'static str, String, String);

/// A section.
type Lines = Vec<Line>;

/// The whole table.
pub fn render(report: &Report) -> String {
    let mut table = output::table(UTF8_FULL);
    table.apply_modifier(UTF8_ROUND_CORNERS);
    for (title, lines) in sections(report) {
        if lines.is_empty() {
            continue;
        }
        let column = |of: fn(&Line) -> String| lines.iter().map(of).collect::<Vec<_>>().join("\n");
        table.add_row([
            Cell::new(label(title)).add_attribute(Attribute::Bold),
            Cell::new(column(|line| label(line.0))),
            Cell::new(column(|line| line.1.clone())).set_alignment(CellAlignment::Right),
            Cell::new(column(|line| line.2.clone())).add_attribute(Attribute::Dim),
        ]);
    }
    let (colour, verdict) = verdict(report);
    format!("{}\n{table}\n{}", heading(report), verdict_line(colour, &verdict))
}

/// The sections: those whose name is an object's in the JSON hold what is in it, the others what is
/// beside it.
fn sections(report: &Report) -> [(&'static str, Lines); 10] {
    [
        ("requests", requests(report)),
        ("time", time(report)),
        ("tokens", tokens(report)),
        ("blocks", blocks(report)),
        ("prefix", prefix(report)),
        ("utilization", utilization(report)),
        ("fragmentation", fragmentation(report)),
        ("defrag", defrag(report)),
        ("resize", report.resize.iter().map(resize).collect()),
        ("latency_ns", latency(report)),
    ]
}

/// The names in the table, each with its section's.
#[cfg(test)]
pub(crate) fn names(report: &Report) -> impl Iterator<Item = (&'static str, &'static str)> {
    sections(report).into_iter().flat_map(|(title, lines)| lines.into_iter().map(move |line| (title, line.0)))
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

fn requests(report: &Report) -> Lines {
    vec![
        ("completed", count(report.completed), format!("of {}", HumanCount(report.requests))),
        ("rejected", count(report.rejected), "larger than the pool".into()),
        ("preempted", count(report.preempted), "gave way and started over".into()),
    ]
}

fn time(report: &Report) -> Lines {
    vec![
        ("wall_s", format!("{:.2} s", report.wall_s), String::new()),
        ("trace_s", format!("{:.0} s", report.trace_s), "first arrival to last".into()),
        ("speedup", format!("{} x", HumanCount(report.speedup.round() as u64)), "real time".into()),
    ]
}

fn tokens(report: &Report) -> Lines {
    let rate = report.tokens as f64 / report.wall_s.max(f64::MIN_POSITIVE) / 1e6;
    let verified = if report.tokens_verified == 0 { "not verified" } else { "read back and compared" };
    vec![
        ("tokens", count(report.tokens), format!("written, {rate:.1} million a second")),
        ("tokens_verified", count(report.tokens_verified), verified.into()),
    ]
}

fn blocks(report: &Report) -> Lines {
    let bytes = BinaryBytes(report.block_bytes * report.blocks_total as u64);
    let corrupt = if report.tokens_verified == 0 { "not verified" } else { "" };
    vec![
        (
            "blocks_total",
            count(report.blocks_total as u64),
            format!("of {} tokens, {bytes} in all", report.block_tokens),
        ),
        ("blocks_allocated", count(report.blocks_allocated), String::new()),
        ("blocks_freed", count(report.blocks_freed), String::new()),
        ("blocks_leaked", count(report.blocks_leaked), String::new()),
        ("blocks_corrupt", count(report.blocks_corrupt), corrupt.into()),
        (
            "run_len_mean",
            format!("{:.1}", report.run_len_mean),
            "blocks in a row, of a sequence when it ends".into(),
        ),
    ]
}

fn prefix(report: &Report) -> Lines {
    let Some(prefix) = &report.prefix else {
        return vec![("off", "-".into(), String::new())];
    };
    let found = format!("{} of {} blocks of prompts", count(prefix.hit_blocks), count(prefix.lookup_blocks));
    let mut lines = vec![
        ("hit_rate", percent(prefix.hit_rate), found),
        ("evicted_blocks", count(prefix.evicted_blocks), format!("by policy {}", prefix.policy)),
    ];
    if prefix.resumed_lookup_blocks > 0 {
        let of = format!("of {} blocks of those who had given way", count(prefix.resumed_lookup_blocks));
        lines.push(("resumed_hit_blocks", count(prefix.resumed_hit_blocks), of));
    }
    lines
}

fn utilization(report: &Report) -> Lines {
    let utilization = &report.utilization;
    let (refusal, note) = match utilization.at_first_refusal {
        Some(share) => (percent(share), format!("refused {} times", HumanCount(report.refused))),
        None => ("-".to_owned(), "nothing was refused".to_owned()),
    };
    vec![
        ("mean", percent(utilization.mean), "of blocks, over virtual time".into()),
        ("peak", percent(utilization.peak), String::new()),
        ("at_first_refusal", refusal, note),
    ]
}

fn fragmentation(report: &Report) -> Lines {
    let fragmentation = &report.fragmentation;
    vec![
        ("mean", percent(fragmentation.mean), "of free blocks, outside long runs".into()),
        ("max", percent(fragmentation.max), String::new()),
        ("final", percent(fragmentation.at_end), "all blocks free".into()),
    ]
}

fn defrag(report: &Report) -> Lines {
    let Some(defrag) = &report.defrag else {
        return vec![("off", "-".into(), String::new())];
    };
    let mean = if defrag.runs == 0 { 0.0 } else { defrag.time_ms / defrag.runs as f64 };
    let mut lines = vec![
        ("runs", count(defrag.runs), String::new()),
        ("time_ms", format!("{:.1} ms", defrag.time_ms), format!("{mean:.2} ms a run")),
        ("moved_blocks", count(defrag.moved_blocks), BinaryBytes(defrag.moved_bytes).to_string()),
        ("given_up", count(defrag.given_up), "moves of what was needed meanwhile".into()),
    ];
    if defrag.runs > 0 {
        for (name, share) in [
            ("fragmentation_before", defrag.fragmentation_before),
            ("fragmentation_after", defrag.fragmentation_after),
        ] {
            lines.push((name, percent(share), "a run, on average".into()));
        }
    }
    lines.extend(defrag.errors.iter().map(|error| ("errors", "-".into(), error.clone())));
    lines
}

fn resize(step: &ResizeStep) -> Line {
    let tries = if step.attempts == 1 {
        "1 try".to_owned()
    } else {
        format!("{} tries", count(step.attempts.into()))
    };
    let from = format!("from {} at request {}", count(step.from as u64), count(step.at_request));
    let note = format!("{from}: {}, {tries}, {:.1} ms", step.outcome, step.time_ms);
    ("to", count(step.to as u64), note)
}

fn latency(report: &Report) -> Lines {
    let line = |latency: &Latency| {
        let [p99, p999, max] = [latency.p99, latency.p999, latency.max].map(duration);
        (duration(latency.p50), format!("p50; p99 {p99}, p99.9 {p999}, max {max}"))
    };
    let (allocate, allocate_note) = line(&report.latency_ns.allocate);
    let (free, free_note) = line(&report.latency_ns.free);
    vec![("allocate", allocate, allocate_note), ("free", free, free_note)]
}

fn count(value: u64) -> String {
    HumanCount(value).to_string()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
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

    #[test]
    fn durations_have_units_that_fit() {
        assert_eq!([7, 9_999, 10_000, 12_345_678].map(duration), ["7 ns", "9999 ns", "10.0 us", "12.3 ms"]);
    }

    #[test]
    fn figures_are_grouped() {
        assert_eq!((count(12_031).as_str(), percent(0.9912).as_str()), ("12,031", "99.1 %"));
    }

    #[test]
    fn a_size_says_how_it_came_about() {
        let step = ResizeStep {
            at_request: 12_000,
            from: 40_000,
            to: 14_000,
            time_ms: 1234.56,
            attempts: 3,
            outcome: "blocked: 1 block is in the way: b7 pinned".into(),
        };
        let note =
            "from 40,000 at request 12,000: blocked: 1 block is in the way: b7 pinned, 3 tries, 1234.6 ms";
        assert_eq!(resize(&step), ("to", "14,000".to_owned(), note.to_owned()));
        let done = ResizeStep { attempts: 1, outcome: "done".into(), time_ms: 0.04, ..step };
        assert_eq!(resize(&done).2, "from 40,000 at request 12,000: done, 1 try, 0.0 ms");
    }
}
