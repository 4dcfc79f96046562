//! The report as a table for a terminal: a section a row, figures aligned, units beside them.

use comfy_table::modifiers::UTF8_ROUND_CORNERS;
use comfy_table::presets::UTF8_FULL;
use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};
use indicatif::{BinaryBytes, HumanCount};

use super::{Latency, Report, ResizeStep};

/// What, how much, and what to know about it.
type Line = (&'static str, String, String);

/// A section.
type Lines = Vec<Line>;

/// The whole table.
pub fn render(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL).apply_modifier(UTF8_ROUND_CORNERS);
    for (title, lines) in [
        ("requests", requests(report)),
        ("time", time(report)),
        ("tokens", tokens(report)),
        ("blocks", blocks(report)),
        ("prefixes", prefix(report)),
        ("in use", utilization(report)),
        ("contiguity", contiguity(report)),
        ("compaction", compaction(report)),
        ("sizes", report.resize.iter().flat_map(resize).collect()),
        ("latency", latency(report)),
    ] {
        if lines.is_empty() {
            continue;
        }
        let column =
            |of: for<'a> fn(&'a Line) -> &'a str| lines.iter().map(of).collect::<Vec<_>>().join("\n");
        table.add_row([
            Cell::new(title).add_attribute(Attribute::Bold),
            Cell::new(column(|line| line.0)),
            Cell::new(column(|line| &line.1)).set_alignment(CellAlignment::Right),
            Cell::new(column(|line| &line.2)).add_attribute(Attribute::Dim),
        ]);
    }
    let (colour, verdict) = if report.sound {
        (Color::Green, "nothing lost, nothing corrupt".to_owned())
    } else {
        (Color::Red, unsound(report))
    };
    format!("{}\n{table}\n{}", heading(report), verdict_line(colour, &verdict))
}

fn heading(report: &Report) -> String {
    let threads =
        if report.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", report.threads) };
    format!("{} on {threads}, layout {}", report.trace, report.layout)
}

/// Coloured by the same rules as the table: only on a terminal.
fn verdict_line(colour: Color, verdict: &str) -> String {
    let mut line = Table::new();
    line.load_preset(comfy_table::presets::NOTHING);
    line.add_row([Cell::new(verdict).fg(colour).add_attribute(Attribute::Bold)]);
    line.to_string()
}

fn unsound(report: &Report) -> String {
    let mut all = Vec::new();
    let unsettled = report.requests - report.completed - report.rejected;
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
        ("wall", format!("{:.2} s", report.wall_s), String::new()),
        ("trace", format!("{:.0} s", report.trace_s), "first arrival to last".into()),
        ("speed-up", format!("{} x", HumanCount(report.speedup.round() as u64)), "real time".into()),
    ]
}

fn tokens(report: &Report) -> Lines {
    let rate = report.tokens as f64 / report.wall_s.max(f64::MIN_POSITIVE) / 1e6;
    let verified = if report.tokens_verified == 0 { "not verified" } else { "read back and compared" };
    vec![
        ("written", count(report.tokens), format!("{rate:.1} million a second")),
        ("verified", count(report.tokens_verified), verified.into()),
    ]
}

fn blocks(report: &Report) -> Lines {
    let bytes = BinaryBytes(report.block_bytes * report.blocks_total as u64);
    let corrupt = if report.tokens_verified == 0 { "not verified" } else { "" };
    vec![
        (
            "pool",
            count(report.blocks_total as u64),
            format!("of {} tokens, {bytes} in all", report.block_tokens),
        ),
        ("allocated", count(report.blocks_allocated), String::new()),
        ("freed", count(report.blocks_freed), String::new()),
        ("leaked", count(report.blocks_leaked), String::new()),
        ("corrupt", count(report.blocks_corrupt), corrupt.into()),
    ]
}

fn prefix(report: &Report) -> Lines {
    let Some(prefix) = &report.prefix else {
        return vec![("off", "-".into(), String::new())];
    };
    let found = format!("{} of {} blocks of prompts", count(prefix.hit_blocks), count(prefix.lookup_blocks));
    let mut lines = vec![
        ("hit rate", percent(prefix.hit_rate), found),
        ("evicted", count(prefix.evicted_blocks), format!("by policy {}", prefix.policy)),
    ];
    if prefix.resumed_lookup_blocks > 0 {
        let of = format!("of {} blocks of those who had given way", count(prefix.resumed_lookup_blocks));
        lines.push(("found again", count(prefix.resumed_hit_blocks), of));
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
        ("at first refusal", refusal, note),
    ]
}

fn contiguity(report: &Report) -> Lines {
    let fragmentation = &report.fragmentation;
    vec![
        ("fragmentation, mean", percent(fragmentation.mean), "of free blocks, outside long runs".into()),
        ("fragmentation, max", percent(fragmentation.max), String::new()),
        ("fragmentation, final", percent(fragmentation.at_end), "all blocks free".into()),
        (
            "run, mean",
            format!("{:.1} blocks", report.run_len_mean),
            "of a sequence's table, when it ends".into(),
        ),
    ]
}

fn compaction(report: &Report) -> Lines {
    let Some(defrag) = &report.defrag else {
        return vec![("off", "-".into(), String::new())];
    };
    let mean = if defrag.runs == 0 { 0.0 } else { defrag.time_ms / defrag.runs as f64 };
    let mut lines = vec![
        ("runs", count(defrag.runs), format!("{mean:.2} ms each, {:.0} ms in all", defrag.time_ms)),
        ("blocks moved", count(defrag.moved_blocks), BinaryBytes(defrag.moved_bytes).to_string()),
        ("moves given up", count(defrag.given_up), "somebody else was first".into()),
    ];
    if defrag.runs > 0 {
        let before = format!("{} before, on average", percent(defrag.fragmentation_before));
        lines.push(("fragmentation after", percent(defrag.fragmentation_after), before));
    }
    lines.extend(defrag.errors.iter().map(|error| ("error", "-".into(), error.clone())));
    lines
}

fn resize(step: &ResizeStep) -> Lines {
    let tries = if step.attempts == 1 {
        "1 try".to_owned()
    } else {
        format!("{} tries", count(step.attempts.into()))
    };
    let from = format!("from {} at request {}", count(step.from as u64), count(step.at_request));
    let note = format!("{from}: {}, {tries}, {:.1} ms", step.outcome, step.time_ms);
    vec![("blocks", count(step.to as u64), note)]
}

fn latency(report: &Report) -> Lines {
    let line = |latency: &Latency| {
        let [p99, p999, max] = [latency.p99, latency.p999, latency.max].map(duration);
        (duration(latency.p50), format!("p99 {p99}, p99.9 {p999}, max {max}"))
    };
    let (allocate, allocate_note) = line(&report.latency_ns.allocate);
    let (free, free_note) = line(&report.latency_ns.free);
    vec![("append, p50", allocate, allocate_note), ("free sequence, p50", free, free_note)]
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
        assert_eq!(resize(&step), [("blocks", "14,000".to_owned(), note.to_owned())]);
        let done = ResizeStep { attempts: 1, outcome: "done".into(), time_ms: 0.04, ..step };
        assert_eq!(resize(&done)[0].2, "from 40,000 at request 12,000: done, 1 try, 0.0 ms");
    }
}
