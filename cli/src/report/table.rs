//! The report as a table for a terminal: one row per figure, in sections, with notes. Figures are
//! read from the JSON by name, and labelled with these names as words.

use comfy_table::presets::{NOTHING, UTF8_FULL_CONDENSED};
use comfy_table::{Attribute, Cell, CellAlignment, Color};
use indicatif::{BinaryBytes, HumanCount};
use serde_json::Value;

use super::Report;
use crate::{fit, output};

/// A section of the table, the name of a figure in the JSON, and a note.
type Row = (&'static str, &'static str, String);

/// Sections that a brief table leaves out.
const OMITTED: [&str; 3] = ["utilization", "fragmentation", "defrag"];

/// Instead of a name: the section has no figures.
const OFF: &str = "off";

pub fn render(report: &Report, width: Option<usize>) -> String {
    let json = &report.figures;
    let mut table = output::table(UTF8_FULL_CONDENSED);
    let mut rows = rows(json);
    rows.retain(|(section, ..)| !report.is_brief || !OMITTED.contains(section));
    for rows in rows.chunk_by(|(section, ..), (other, ..)| section == other) {
        for (index, (section, name, note)) in rows.iter().enumerate() {
            let object = match &json[section] {
                Value::Array(items) => &items[index],
                object @ Value::Object(_) => object,
                _ => json,
            };
            let figure = match *name {
                OFF => "-".to_owned(),
                name => figure(name, object.get(name).expect("a name of the JSON")),
            };
            // Lines repeat the section, unless the name begins with it.
            let has_title = match width {
                Some(width) if width < fit::TABLE_MIN => !name.starts_with(section),
                _ => index == 0,
            };
            table.add_row([
                Cell::new(if has_title { label(section) } else { String::new() })
                    .add_attribute(Attribute::Bold),
                Cell::new(label(name)),
                Cell::new(figure).set_alignment(CellAlignment::Right),
                Cell::new(note).add_attribute(Attribute::Dim),
            ]);
        }
    }
    let threads = match number(&json["threads"]) {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    let on = if json["model"].is_null() { "layout" } else { "model" };
    let heading = format!("{} on {threads}, {on} {}", text(&json["trace"]), text(&json[on]));
    // Coloured by the same rules as the table: only on a terminal.
    let (colour, verdict) = verdict(report);
    let mut line = output::table(NOTHING);
    let verdict = fit::text(&verdict, width.map(|width| width.saturating_sub(2)));
    line.add_row([Cell::new(verdict).fg(colour).add_attribute(Attribute::Bold)]);
    format!("{}\n{}\n{line}", fit::text(&heading, width), fit::table(table, width))
}

/// Returns the rows. A section named like an object of the JSON has its figures; one named like a
/// list, a figure of each of its objects; any other, figures of the report itself.
fn rows(json: &Value) -> Vec<Row> {
    let count = |value: &Value| HumanCount(number(value));
    let mut rows = Vec::new();
    let mut row = |section, name, note: &str| rows.push((section, name, note.to_owned()));
    row("requests", "completed", &format!("of {}", count(&json["requests"])));
    row("requests", "rejected", "larger than the pool");
    row("requests", "preempted", "restarted later");
    row("time", "wall_s", "");
    row("time", "cpu_s", "of all threads");
    let sessions = &json["sessions"];
    let span = if sessions.is_null() { "first arrival to last" } else { "virtual, to the last answer" };
    row("time", "trace_s", span);
    row("time", "speedup", "real time");
    let tokens_per_s = share(&json["tokens"]) / share(&json["wall_s"]).max(f64::MIN_POSITIVE);
    row("tokens", "tokens", &format!("written, {:.1} million a second", tokens_per_s / 1e6));
    let [checked, corrupt] = match number(&json["tokens_verified"]) {
        0 => ["not verified"; 2],
        _ => ["read back and compared", ""],
    };
    row("tokens", "tokens_verified", checked);
    let held = match &json["tokens_held_at_first_refusal"] {
        Value::Null => "by open sequences".to_owned(),
        tokens => format!("by open sequences; {} at the first refusal", count(tokens)),
    };
    row("tokens", "peak_tokens_held", &held);
    let pool_bytes = BinaryBytes(number(&json["block_bytes"]) * number(&json["blocks_total"]));
    let of_groups = list(&json["groups"]).filter_map(|group| group["block_tokens"].as_u64());
    let tokens = match of_groups.min() {
        Some(least) if json["block_tokens"] != least => format!("{least} to {}", json["block_tokens"]),
        _ => json["block_tokens"].to_string(),
    };
    row("blocks", "blocks_total", &format!("of {tokens} tokens, {pool_bytes} in all"));
    row("blocks", "blocks_allocated", "");
    row("blocks", "blocks_freed", "");
    row("blocks", "blocks_leaked", "");
    row("blocks", "blocks_corrupt", corrupt);
    row("blocks", "run_len_mean", "blocks in a row, of a sequence when it ends");
    let runs = |runs: &Value| {
        format!("p50, of a completed request; mean {:.1}, p99 {}", share(&runs["mean"]), count(&runs["p99"]))
    };
    row("blocks", "runs_per_sequence", &runs(&json["runs_per_sequence"]));
    for group in list(&json["groups"]) {
        let mut note = format!("{}, {} layers", text(&group["keeps"]), count(&group["layers"]));
        note += &format!("; mean {}", HumanCount(share(&group["frames_mean"]).round() as u64));
        if group["blocks_given_up"] != 0 {
            note += &format!("; {} given up", count(&group["blocks_given_up"]));
        }
        row("groups", "frames_peak", &note);
    }
    if let Some(refused) = json["states"].get("refused") {
        row("states", "checkpoints", &format!("kept at cuts; no memory for {}", count(refused)));
    }
    let free_list = &json["free_list"];
    if !free_list.is_null() {
        row("free_list", "run_len_mean", "the same requests, in a queue of single blocks");
        row("free_list", "runs_per_sequence", &runs(&free_list["runs_per_sequence"]));
    }
    if !free_list["hit_rate"].is_null() {
        row("free_list", "hit_rate", "evicted in exact LRU order");
    }
    let prefix = &json["prefix"];
    if prefix.is_null() {
        row("prefix", OFF, "");
    } else {
        let (hits, lookups) = (count(&prefix["hit_blocks"]), count(&prefix["lookup_blocks"]));
        row("prefix", "hit_rate", &format!("{hits} of {lookups} blocks of prompts"));
        row("prefix", "evicted_blocks", &format!("by policy {}", text(&prefix["policy"])));
    }
    let resumed = &prefix["resumed_lookup_blocks"];
    if number(resumed) > 0 {
        let note = format!("of {} blocks of preempted requests", count(resumed));
        row("prefix", "resumed_hit_blocks", &note);
    }
    if !sessions.is_null() {
        let at_once = match number(&sessions["at_once"]) {
            1 => "one at a time".to_owned(),
            at_once => format!("{} at a time", HumanCount(at_once)),
        };
        let mut note = format!("of {}, {at_once}", count(&sessions["sessions"]));
        match number(&sessions["subagents"]) {
            0 => {}
            1 => note += "; 1 subagent",
            subagents => note += &format!("; {} subagents", HumanCount(subagents)),
        }
        row("sessions", "completed", &note);
        let note = format!("known before; prompts had {}", count(&sessions["prompt_tokens"]));
        row("sessions", "recomputed_tokens", &note);
        let first = &sessions["first_token_ms"];
        let [mean, p99] = ["mean", "p99"].map(|name| milliseconds(share(&first[name])));
        row("sessions", "first_token_ms", &format!("p50, queueing and prefill; mean {mean}, p99 {p99}"));
    }
    row("utilization", "mean", "of blocks, over virtual time");
    row("utilization", "peak", "");
    let refused = match json["utilization"]["at_first_refusal"] {
        Value::Null => "nothing was refused".to_owned(),
        _ => format!("refused {} times", count(&json["refused"])),
    };
    row("utilization", "at_first_refusal", &refused);
    row("fragmentation", "mean", "of free blocks, outside long runs");
    row("fragmentation", "max", "");
    row("fragmentation", "final", "all blocks free");
    row("fragmentation", "reserved_for_growth", "of all blocks: free, kept for the growth of sequences");
    let defrag = &json["defrag"];
    let runs = number(&defrag["runs"]);
    if defrag.is_null() {
        row("defrag", OFF, "");
    } else {
        row("defrag", "runs", "");
        row("defrag", "time_ms", &format!("{:.2} ms a run", share(&defrag["time_ms"]) / runs.max(1) as f64));
        row("defrag", "moved_blocks", &BinaryBytes(number(&defrag["moved_bytes"])).to_string());
        row("defrag", "dropped_blocks", "evicted from the frames that others moved to");
        row("defrag", "given_up", "moves cancelled by a concurrent use");
    }
    if runs > 0 {
        row("defrag", "fragmentation_before", "a run, on average");
        row("defrag", "fragmentation_after", "a run, on average");
        row("defrag", "available_fragmentation_before", "the same, with evictable blocks as free");
        row("defrag", "available_fragmentation_after", "the same, with evictable blocks as free");
    }
    for error in list(&defrag["errors"]) {
        row("defrag", "errors", text(error));
    }
    for step in list(&json["resize"]) {
        row("resize", "to", &resize(step));
    }
    row("latency_ns", "allocate", &quantiles(&json["latency_ns"]["allocate"]));
    row("latency_ns", "free", &quantiles(&json["latency_ns"]["free"]));
    rows
}

fn figure(name: &str, value: &Value) -> String {
    match (value.as_u64(), value.as_f64(), name) {
        (Some(count), ..) => HumanCount(count).to_string(),
        (_, Some(figure), "wall_s" | "cpu_s") => format!("{figure:.2} s"),
        (_, Some(figure), "trace_s") => format!("{figure:.0} s"),
        (_, Some(figure), "time_ms") => format!("{figure:.1} ms"),
        (_, Some(figure), "speedup") => format!("{} x", HumanCount(figure.round() as u64)),
        (_, Some(figure), "run_len_mean") => format!("{figure:.1}"),
        (_, Some(share), _) => format!("{:.1} %", share * 100.0),
        (.., "first_token_ms") => milliseconds(share(&value["p50"])),
        (.., "runs_per_sequence") => HumanCount(number(&value["p50"])).to_string(),
        _ => value["p50"].as_u64().map_or("-".to_owned(), duration),
    }
}

/// Returns a name of the JSON as words, without the unit, which is beside the figure.
fn label(name: &str) -> String {
    let unit = ["_s", "_ms", "_ns"].into_iter().find_map(|unit| name.strip_suffix(unit));
    unit.unwrap_or(name).replace('_', " ")
}

fn milliseconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{ms:.0} ms") } else { format!("{:.1} s", ms / 1e3) }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn share(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn verdict(report: &Report) -> (Color, String) {
    let json = &report.figures;
    let checked =
        if report.verify { "nothing lost, nothing corrupt" } else { "nothing lost; no token was read back" };
    let settled = number(&json["completed"]) + number(&json["rejected"]);
    let requests = number(&json["requests"]);
    if json["interrupted"] == true && report.intact {
        let (settled, all) = (HumanCount(settled), HumanCount(requests));
        return (
            Color::Yellow,
            format!("INTERRUPTED after {settled} of {all} requests; until then {checked}"),
        );
    }
    if json["sound"] == true {
        return (Color::Green, checked.to_owned());
    }
    let mut all = vec!["NOT SOUND".to_owned()];
    for (count, what) in [
        (if json["interrupted"] == true { 0 } else { requests - settled }, "requests not settled"),
        (number(&json["blocks_leaked"]), "blocks leaked"),
        (number(&json["blocks_allocated"]).abs_diff(number(&json["blocks_freed"])), "blocks not freed"),
        (number(&json["blocks_corrupt"]), "blocks corrupt"),
    ] {
        if count > 0 {
            all.push(format!("{} {what}", HumanCount(count)));
        }
    }
    if json["audit"] != "ok" {
        all.push(format!("audit: {}", text(&json["audit"])));
    }
    all.extend(list(&json["findings"]).map(|finding| text(finding).to_owned()));
    (Color::Red, all.join("\n"))
}

fn resize(step: &Value) -> String {
    let tries = match number(&step["attempts"]) {
        1 => "1 try".to_owned(),
        tries => format!("{} tries", HumanCount(tries)),
    };
    let [from, at] = ["from", "at_request"].map(|name| HumanCount(number(&step[name])));
    let (outcome, time_ms) = (text(&step["outcome"]), share(&step["time_ms"]));
    format!("from {from} at request {at}: {outcome}, {tries}, {time_ms:.1} ms")
}

fn quantiles(durations: &Value) -> String {
    let [p99, p999, max] = ["p99", "p999", "max"].map(|name| duration(number(&durations[name])));
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
    use serde_json::json;

    use super::*;
    use crate::replay::{Resize, ResizeRefusal};

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
            ("cpu_s", Value::from(3.456), "3.46 s"),
            ("cpu_s", Value::Null, "-"),
            ("runs_per_sequence", json!({"mean": 7.5, "p50": 1_234, "p99": 9_876}), "1,234"),
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
        assert_eq!(resize(&super::super::resize(&step)), note);
        let done = Resize { attempts: 1, outcome: Ok(()), time_ms: 0.04, ..step };
        assert_eq!(
            resize(&super::super::resize(&done)),
            "from 40,000 at request 12,000: done, 1 try, 0.0 ms"
        );
    }
}
