//! Answers of an admin interface as text: statistics and migrations.

use std::collections::BTreeSet;
use std::time::Duration;

use comfy_table::CellAlignment;
use comfy_table::presets::{NOTHING, UTF8_FULL_CONDENSED};
use indicatif::{BinaryBytes, FormattedDuration, HumanCount};
use kvpool::CompactionState;
use kvpool_node::admin::{
    MigrationRecord, MigrationState, OwnerRecord, OwnersReport, SequenceStats, StatsReport,
};
use serde_json::{Value, json};

use crate::figures::{count, latency, percent, word};
use crate::{fit, output};

/// Digits of a migration's id in the table; `--json` has all of them.
const ID_DIGITS: usize = 8;

/// Returns the statistics of a node as text: a line about the node, a table of its pool, and one
/// per group of counters.
pub(super) fn stats(stats: &StatsReport, width: Option<usize>) -> String {
    let up = FormattedDuration(Duration::from_secs(stats.uptime_s));
    let mut text = format!("{} (kvpool {}), up {up}\n", stats.node, stats.version);
    text += &three_columns(&of_the_pool(stats), width);
    for (group, counters) in &stats.extra {
        let (members, counters): (Vec<_>, Vec<_>) =
            counters.as_object().into_iter().flatten().partition(|(_, value)| value.is_object());
        if !counters.is_empty() {
            let rows: Vec<_> = counters.into_iter().map(|(name, value)| counter(name, value)).collect();
            text += &format!("\n{group}\n{}", three_columns(&rows, width));
        }
        // A group of services, each with its own counters.
        for (name, counters) in members {
            text += &format!("\n{group}: {name}\n{}", three_columns(&nested("", counters), width));
        }
    }
    text
}

/// Returns the counters of a service, and those of its parts, with both names.
fn nested(of: &str, counters: &Value) -> Vec<Row> {
    let rows = counters.as_object().into_iter().flatten().map(|(name, value)| {
        let name = format!("{of}{name}");
        match value {
            Value::Object(_) => nested(&format!("{name}_"), value),
            // No reason.
            Value::Null => Vec::new(),
            _ => vec![counter(&name, value)],
        }
    });
    rows.flatten().collect()
}

type Row = (String, String, String);

fn of_the_pool(stats: &StatsReport) -> Vec<Row> {
    let gauges = &stats.metrics.stats;
    let share = |blocks: usize| percent(100.0 * blocks as f64 / stats.total.max(1) as f64);
    let size = stats.of_sequences.as_ref().map_or("frames of an engine".to_owned(), |of| {
        let bytes = BinaryBytes(of.block_bytes as u64 * stats.total as u64);
        format!("blocks of {} tokens, {bytes}", of.block_tokens)
    });
    let mut rows = vec![
        ("total", count(stats.total), size),
        ("used", count(stats.used), percent(stats.used_percent)),
        (
            "free",
            count(stats.free),
            format!("{}, pressure {}", share(stats.free), format!("{:?}", gauges.pressure).to_lowercase()),
        ),
        ("evictable", count(stats.evictable), format!("{}, cached without an owner", share(stats.evictable))),
        (
            "retired",
            count(gauges.retired),
            format!("freed, and a batch may still see them; {} batches in flight", gauges.batches_in_flight),
        ),
        (
            "fragmentation",
            percent(100.0 * stats.fragmentation.rate),
            format!(
                "of the possible free runs are missing; longest free run: {} blocks",
                count(stats.fragmentation.longest_run)
            ),
        ),
        (
            "  if all were evicted",
            percent(100.0 * stats.available_fragmentation),
            "of the runs of free and evictable blocks".to_owned(),
        ),
    ];
    match &stats.of_sequences {
        Some(of) => rows.extend(of_sequences(of, gauges.waiting)),
        None => rows.push(("waiting", count(gauges.waiting), "requests for blocks".to_owned())),
    }
    rows.push((
        "moved",
        count(stats.metrics.moves.moved_blocks as usize),
        format!("blocks, in {} compactions and resizes", HumanCount(stats.metrics.moves.runs)),
    ));
    rows.into_iter().map(|(name, figure, note)| (name.to_owned(), figure, note)).collect()
}

fn of_sequences(stats: &SequenceStats, waiting: usize) -> [(&'static str, String, String); 6] {
    let runs = &stats.sequence_runs;
    let time = |ns: f64| match stats.allocation.samples {
        0 => "-".to_owned(),
        _ => latency(ns),
    };
    [
        ("sequences", count(stats.sequences), format!("open; {waiting} requests wait for blocks")),
        (
            "compaction",
            stats.compaction.map_or("off", CompactionState::name).to_owned(),
            stats.compaction.map_or_else(|| "no background task".to_owned(), |state| state.to_string()),
        ),
        (
            "runs of a sequence",
            format!("{:.1}", runs.mean),
            format!("descriptors of its transfer; p50 {}, p99 {}", count(runs.p50), count(runs.p99)),
        ),
        ("  mean run", format!("{:.1}", runs.mean_run), "blocks, of the open sequences".to_owned()),
        (
            "allocation mean",
            time(stats.allocation.mean_ns),
            format!("of {} timed allocations", count(stats.allocation.samples as usize)),
        ),
        ("allocation p99", time(stats.allocation.p99_ns as f64), String::new()),
    ]
}

/// Returns a counter, or the state of something, as a row.
fn counter(name: &str, value: &Value) -> Row {
    let words = name.replace('_', " ");
    match (value, value.as_u64()) {
        // A state, named after its owner.
        (Value::String(state), _) => (name.to_owned(), String::new(), state.clone()),
        // An id, not a count.
        (_, Some(id)) if name.ends_with("_sequence") => (words, id.to_string(), String::new()),
        (_, Some(bytes)) if name.ends_with("_bytes") => {
            (words, HumanCount(bytes).to_string(), BinaryBytes(bytes).to_string())
        }
        (_, Some(number)) => (words, HumanCount(number).to_string(), String::new()),
        (Value::Array(names), _) => {
            let names: Vec<_> = names.iter().map(|name| name.as_str().unwrap_or_default()).collect();
            (words, HumanCount(names.len() as u64).to_string(), names.join(", "))
        }
        (Value::Bool(is_so), _) => (words, if *is_so { "yes" } else { "no" }.to_owned(), String::new()),
        _ => (words, value.to_string(), String::new()),
    }
}

fn three_columns(rows: &[Row], width: Option<usize>) -> String {
    let mut table = output::table(NOTHING);
    table.add_rows(rows.iter().map(|(name, figure, note)| [name, figure, note]));
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    fit::table(table, width)
}

/// Returns migrations as a table, newest first, with counts by state.
pub(super) fn migrations(migrations: &[MigrationRecord], width: Option<usize>) -> String {
    if migrations.is_empty() {
        return "no migrations".to_owned();
    }
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header([
        "id", "kind", "peer", "sequence", "state", "blocks", "bytes", "runs", "via", "time", "reason",
    ]);
    for record in migrations {
        table.add_row([
            record.id.chars().take(ID_DIGITS).collect(),
            word(&json!(record.kind)),
            format!("{} {}", record.way(), record.peer),
            record.sequence.map_or("-".to_owned(), |id| id.to_string()),
            word(&json!(record.state)),
            count(record.blocks),
            BinaryBytes(record.bytes).to_string(),
            count(record.runs),
            record.transport.map_or("-".to_owned(), |transport| word(&json!(transport))),
            format!("{} ms", HumanCount(record.time_ms)),
            record.reason.clone().unwrap_or_default(),
        ]);
    }
    for column in [5, 6, 7, 9] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{}\n{}", fit::table(table, width), summary(migrations))
}

fn summary(migrations: &[MigrationRecord]) -> String {
    let of =
        |is_it: fn(MigrationState) -> bool| migrations.iter().filter(|record| is_it(record.state)).count();
    let committed = of(|state| state == MigrationState::Committed);
    let aborted = of(|state| state == MigrationState::Aborted);
    let in_doubt = of(|state| state == MigrationState::InDoubt);
    let under_way = migrations.len() - committed - aborted - in_doubt;
    let mut text = format!("{under_way} under way, {committed} committed, {aborted} aborted");
    if in_doubt > 0 {
        let doubts = migrations.iter().filter(|record| record.state == MigrationState::InDoubt);
        let peers: BTreeSet<_> = doubts.map(|record| format!("--peer {}", record.peer)).collect();
        let peers = Vec::from_iter(peers).join(" or ");
        text += &format!(
            ", {in_doubt} IN DOUBT: the other node was told to commit and has not answered. If its process \
             has ended: kvpool declare-ended {peers}"
        );
    }
    text
}

pub(super) fn owners(report: &OwnersReport, width: Option<usize>) -> String {
    let oldest = report.oldest_batch_s.map_or(String::new(), |age| format!(", the oldest for {age:.1} s"));
    let mut text = format!(
        "{} owners of {} blocks; {} pinned, {} retired; {} batches in flight{oldest}",
        count(report.total),
        count(report.blocks),
        count(report.pinned_blocks),
        count(report.retired_blocks),
        HumanCount(report.batches_in_flight),
    );
    if report.owners.is_empty() {
        return text;
    }
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header([
        "kind",
        "sequence",
        "blocks",
        "reserved",
        "shared",
        "pinned",
        "tokens",
        "priority",
        "held for",
        "allocated at",
    ]);
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    table.add_rows(report.owners.iter().map(|owner: &OwnerRecord| {
        [
            word(&json!(owner.kind)),
            or_none(owner.sequence.map(|id| id.to_string())),
            count(owner.blocks),
            count(owner.reserved_blocks),
            count(owner.shared_blocks),
            count(owner.pinned_blocks),
            or_none(owner.tokens.map(count)),
            or_none(owner.priority.clone()),
            or_none(owner.held_s.map(|held| format!("{held:.1} s"))),
            or_none(owner.allocated_at.clone()),
        ]
    }));
    text += &format!("\n{}", fit::table(table, width));
    let more = report.total - report.owners.len().min(report.total);
    if more > 0 {
        text += &format!("\n{} more with as many blocks or fewer", count(more));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(state: MigrationState) -> MigrationRecord {
        serde_json::from_value(json!({
            "id": "00112233445566778899aabbccddeeff", "kind": "bring_back", "side": "target", "peer": "b",
            "sequence": null, "state": state, "blocks": 1200, "transport": "unix", "bytes": 4096, "runs": 3,
            "time_ms": 1500, "reason": null,
        }))
        .unwrap()
    }

    #[test]
    fn statistics_of_a_pool_of_frames_have_no_sequences() {
        let pool = kvpool::FramePool::builder(100).build().unwrap();
        let report = StatsReport::of("engine", Duration::from_secs(1), &pool.into());
        let text = stats(&report, Some(80));
        for part in ["total", "frames of an engine", "fragmentation", "moved"] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        for absent in ["sequence", "allocation", "tokens", "descriptors"] {
            assert!(!text.contains(absent), "{absent:?} in {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn migrations_are_counted_by_state_and_doubt_is_told_from_commits() {
        let (committing, in_doubt) = (record(MigrationState::Committing), record(MigrationState::InDoubt));
        let text = migrations(&[committing.clone(), record(MigrationState::Committed)], None);
        for part in [
            "00112233 ",
            "bring back",
            "from b",
            "committing",
            "1,200",
            "4.00 KiB",
            " 3 ",
            "unix",
            "1,500 ms",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        assert!(text.ends_with("1 under way, 1 committed, 0 aborted"), "{text}");
        let text = migrations(&[committing, in_doubt], None);
        assert!(text.contains("in doubt") && text.contains("1 under way, 0 committed"), "{text}");
        assert!(text.contains("1 IN DOUBT"), "{text}");
        assert!(text.ends_with("kvpool declare-ended --peer b"), "{text}");
        assert_eq!(migrations(&[], None), "no migrations");
    }

    #[test]
    fn counters_are_words_numbers_and_units() {
        let row = |name: &str, value: Value| {
            let (name, figure, note) = counter(name, &value);
            format!("{name}|{figure}|{note}")
        };
        assert_eq!(row("tokens_verified", 12345.into()), "tokens verified|12,345|");
        assert_eq!(row("sent_bytes", 2048.into()), "sent bytes|2,048|2.00 KiB");
        assert_eq!(row("longest_sequence", 12345.into()), "longest sequence|12345|");
        assert_eq!(row("gpu-node_2", "down: refused".into()), "gpu-node_2||down: refused");
    }
}
