use std::time::Instant;

use indicatif::BinaryBytes;
use kvpool::CompactionState;
use kvpool_node::admin::{MigrationRecord, OwnerRecord, SequenceSummary, StatsSummary};
use serde_json::json;

use super::cells::{CLASSES, Drawn, MIXED};
use super::figures::Figures;
use super::state::{Link, State};
use crate::figures::{count, duration, latency, percent, short, word};
use crate::output::printable;

/// Keys, as the last line and the help name them.
pub(super) const KEYS: &str = "q quit  h help  s sort owners  d defragment  p pause  arrows scroll";

/// Returns the first line: the node, and at the right whether the figures are live.
pub(super) fn header(state: &State, now: Instant) -> (String, String) {
    let figures = state.figures();
    let node = figures.last().map_or("kvpool top".to_owned(), |stats| printable(&stats.node));
    let mut left = format!("{node}  {}", state.url);
    if !figures.version.is_empty() {
        left += &format!("  kvpool {}", figures.version);
    }
    if let Some(stats) = figures.last() {
        left += &format!("  up {}", duration(stats.uptime_s));
    }
    let right = match (state.link(now), state.paused_for(now)) {
        (Link::Lost { .. }, _) => "NOT REACHABLE".to_owned(),
        (Link::Silent(_), _) => "SILENT".to_owned(),
        (_, Some(time)) => format!("PAUSED {}", duration(time.as_secs())),
        (Link::Connecting, None) => "connecting".to_owned(),
        (Link::Live, None) => "live".to_owned(),
    };
    (left, right)
}

/// Returns the line about a silent node, if it is one.
pub(super) fn trouble(state: &State, now: Instant) -> Option<String> {
    match state.link(now) {
        Link::Lost { since, reason } => {
            let old = duration(since.as_secs());
            Some(match state.figures().last() {
                Some(_) => format!("figures of {old} ago; connecting again: {reason}"),
                None => format!("connecting again for {old}: {reason}"),
            })
        }
        Link::Silent(time) => {
            Some(format!("nothing came for {}: the figures are of then", duration(time.as_secs())))
        }
        Link::Connecting | Link::Live => None,
    }
}

/// Returns the occupancy as a bar of this width, in the characters of the map.
pub(super) fn bar(stats: &StatsSummary, width: usize) -> String {
    let total = stats.total.max(1);
    // Ends of the parts, so that rounding leaves no gap.
    let end = |blocks: usize| (blocks.min(total) as f64 / total as f64 * width as f64).round() as usize;
    let used = end(stats.used);
    let evictable = end(stats.used + stats.evictable);
    let free = end(stats.used + stats.evictable + stats.free);
    let part = |symbol: &str, from: usize, to: usize| symbol.repeat(to.saturating_sub(from));
    part("#", 0, used) + &part("+", used, evictable) + &part(".", evictable, free) + &part("~", free, width)
}

pub(super) fn fields(figures: &Figures) -> Vec<String> {
    let Some(stats) = figures.last() else { return vec!["no figures yet".to_owned()] };
    let share = |blocks: usize| percent(100.0 * blocks as f64 / stats.total.max(1) as f64);
    let rate = |counter: fn(&StatsSummary) -> u64| {
        let rate = figures.rate(|stats| Some(counter(stats)));
        rate.map_or("-".to_owned(), |rate| count(rate.round() as usize))
    };
    let batches = stats.oldest_batch_s.map_or(String::new(), |age| format!(", oldest {age:.1} s"));
    let of = stats.of_sequences.as_ref();
    let sent = figures.rate(|stats| Some(stats.of_sequences.as_ref()?.transferred_bytes));
    let hits = figures.hit_rate().map_or("-".to_owned(), |rate| percent(100.0 * rate));
    let fields = [
        Some(format!("used {} of {} ({})", count(stats.used), count(stats.total), share(stats.used))),
        Some(format!("cached {}", count(stats.evictable))),
        Some(format!("free {}", count(stats.free))),
        Some(format!("retired {}", count(stats.retired))),
        Some(format!("reserved {}", count(stats.reserved))),
        Some(format!("held {}", count(stats.held))),
        Some(format!("fragmentation {}", percent(100.0 * stats.fragmentation))),
        Some(format!("with cached {}", percent(100.0 * stats.available_fragmentation))),
        of.map(|of| format!("compaction {}", of.compaction.map_or("off", CompactionState::name))),
        Some(format!("longest free run {}", count(stats.longest_free_run))),
        of.map(|of| format!("mean run of a sequence {:.1}", of.mean_sequence_run)),
        of.map(|of| format!("sequences {}", count(of.sequences))),
        Some(format!("waiting {}", count(stats.waiting))),
        Some(format!("batches {}{batches}", stats.batches_in_flight)),
        of.map(|SequenceSummary { allocation, .. }| {
            format!(
                "allocation p50 {} p99 {} max {}",
                time(allocation.samples, allocation.p50_ns),
                time(allocation.samples, allocation.p99_ns),
                time(allocation.samples, allocation.max_ns)
            )
        }),
        Some(format!("wait p99 {}", time(stats.wait.samples, stats.wait.p99_ns))),
        of.map(|SequenceSummary { sequence_runs: runs, .. }| {
            format!("runs a sequence {:.1} p50 {} p99 {}", runs.mean, runs.p50, runs.p99)
        }),
        Some(format!("blocks/s {}", rate(|stats| stats.allocated_blocks))),
        Some(format!("refused/s {}", rate(|stats| stats.refusals))),
        of.map(|_| format!("prefix hits {hits}")),
        Some(format!("evicted/s {}", rate(|stats| stats.evicted_blocks))),
        Some(format!("moved/s {}", rate(|stats| stats.moved_blocks))),
        of.map(|_| {
            let sent = sent.map(|rate| BinaryBytes(rate.round() as u64).to_string());
            format!("transferred/s {}", sent.unwrap_or_else(|| "-".to_owned()))
        }),
    ];
    fields.into_iter().flatten().collect()
}

fn time(samples: u64, ns: u64) -> String {
    if samples == 0 { "-".to_owned() } else { latency(ns as f64) }
}

/// Truncates a line to this width between words, never between a number and its unit.
pub(super) fn cut(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let room: String = line.chars().take(width).collect();
    let ends = room.match_indices(' ').map(|(end, _)| &room[..end]);
    let is_number = |word: &str| word.starts_with(|char: char| char.is_ascii_digit());
    let kept = ends.rev().find(|kept| kept.rsplit(' ').next().is_some_and(|word| !is_number(word)));
    format!("{}…", kept.unwrap_or("").trim_end_matches([' ', ',', ':', ';']))
}

/// Fills lines of at most this width with fields. A longer field has its own line.
pub(super) fn flow(fields: &[String], width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for field in fields {
        match lines.last_mut() {
            Some(line) if line.len() + 2 + field.len() <= width => *line += &format!("  {field}"),
            _ => lines.push(field.clone()),
        }
    }
    lines
}

/// Returns occupancy and allocation times of the last minutes as two lines, if there is room.
pub(super) fn history(figures: &Figures, width: usize) -> Vec<String> {
    let room = width.saturating_sub(28);
    if room < 60 || figures.history.len() < 2 {
        return Vec::new();
    }
    let latest: Vec<_> = figures.history.iter().skip(figures.history.len().saturating_sub(room)).collect();
    let used = latest.iter().map(|stats| stats.used as f64 / stats.total.max(1) as f64);
    // From 10 ns to 10 ms, in powers of ten.
    let times = latest.iter().map(|stats| match &stats.of_sequences {
        Some(SequenceSummary { allocation, .. }) if allocation.samples > 0 => {
            ((allocation.p99_ns.max(1) as f64).log10() - 1.0) / 6.0
        }
        _ => 0.0,
    });
    let mut lines = vec![format!("{:<28}{}", "used, 0 to 100 %", ramp(used))];
    if figures.last().is_some_and(|stats| stats.of_sequences.is_some()) {
        lines.push(format!("{:<28}{}", "p99, 10 ns to 10 ms (log)", ramp(times)));
    }
    lines
}

/// Returns shares from 0 to 1 as characters of growing height.
fn ramp(shares: impl Iterator<Item = f64>) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    shares.map(|share| LEVELS[((share.clamp(0.0, 1.0) * 8.0) as usize).min(7)]).collect()
}

pub(super) fn legend(drawn: &Drawn) -> Vec<String> {
    let all = drawn.counts.iter().sum::<usize>().max(1);
    let classes = CLASSES.iter().zip(drawn.counts).filter(|&(_, cells)| cells > 0);
    let share = |cells| percent(100.0 * cells as f64 / all as f64);
    let classes = classes.map(|(class, cells)| format!("{} {} {}", class.symbol, class.name, share(cells)));
    classes.chain((drawn.group > 1).then(|| format!("{MIXED} mixed"))).collect()
}

/// Columns of the owners with minimum widths, so that they seldom move. Without room, the last ones
/// are omitted first.
const OWNERS: [(&str, usize); 6] =
    [("kind", 9), ("sequence", 8), ("blocks", 7), ("tokens", 7), ("held", 7), ("shared", 6)];

/// Returns the title and the lines of the owners: a header, and one line each.
pub(super) fn owners(state: &State, rows: usize, width: usize) -> (String, Vec<String>) {
    let report = match &state.figures().owners {
        None => return ("Owners".to_owned(), vec!["not asked yet".to_owned()]),
        Some(Err(reason)) => return ("Owners".to_owned(), vec![format!("no answer: {reason}")]),
        Some(Ok(report)) => report,
    };
    let title = format!(
        "Owners by {}: {} of {} blocks",
        state.order.name(),
        count(report.total),
        count(report.blocks)
    );
    let sorted = state.order.sorted(&report.owners);
    let room = rows.saturating_sub(1);
    // The last page stays full.
    let first = state.scrolled.min(sorted.len().saturating_sub(room));
    let shown: Vec<_> = sorted.into_iter().skip(first).take(room).collect();
    let mut lines = owner_lines(&shown, width);
    if report.owners.is_empty() {
        lines.push("none".to_owned());
    }
    (title, lines)
}

/// Returns owners as lines of at most this width, with short figures if it is narrow.
fn owner_lines(owners: &[&OwnerRecord], width: usize) -> Vec<String> {
    let head = OWNERS.map(|(name, _)| name.to_owned());
    let cells = owners.iter().map(|owner| cells(owner, width < 60));
    let rows: Vec<_> = std::iter::once(head).chain(cells).collect();
    let longest = |at: usize| rows.iter().map(|row| row[at].len()).max().unwrap_or(0).max(OWNERS[at].1);
    let widths: [usize; 6] = std::array::from_fn(longest);
    let fits = |columns: &usize| widths[..*columns].iter().sum::<usize>() + columns - 1 <= width;
    let columns = (3..=widths.len()).rev().find(fits).unwrap_or(2);
    let others = |row: &[String; 6]| {
        (1..columns).map(|at| format!(" {:>1$}", row[at], widths[at])).collect::<String>()
    };
    rows.iter().map(|row| format!("{:<1$}", row[0], widths[0]) + &others(row)).collect()
}

fn cells(owner: &OwnerRecord, is_short: bool) -> [String; 6] {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    // A number, and the larger one of two units of time.
    let (number, words) = if is_short { (short as fn(_) -> _, 2) } else { (count as fn(_) -> _, 4) };
    let held = |held: f64| match held {
        held if held < 60.0 => format!("{held:.1} s"),
        held => duration(held as u64).split(' ').take(words).collect::<Vec<_>>().join(" "),
    };
    [
        word(&json!(owner.kind)),
        or_none(owner.sequence.map(|id| id.to_string())),
        number(owner.blocks),
        or_none(owner.tokens.map(number)),
        or_none(owner.held_s.map(held)),
        number(owner.shared_blocks),
    ]
}

pub(super) fn migrations(figures: &Figures) -> Vec<String> {
    let mut sorted: Vec<_> = figures.migrations.iter().collect();
    sorted.sort_by_key(|record| record.has_ended());
    if sorted.is_empty() {
        return vec!["none".to_owned()];
    }
    sorted.into_iter().map(migration).collect()
}

fn migration(record: &MigrationRecord) -> String {
    let sequence = record.sequence.map_or(String::new(), |id| format!(" of {id}"));
    let reason = record.reason.as_ref().map_or(String::new(), |reason| format!(": {}", printable(reason)));
    format!(
        "{} {} {} {}{sequence}, {} blocks, {}{reason}",
        word(&json!(record.state)),
        record.way(),
        printable(&record.peer),
        word(&json!(record.kind)),
        count(record.blocks),
        BinaryBytes(record.bytes),
    )
}

pub(super) fn services(figures: &Figures) -> Vec<String> {
    if figures.services.is_empty() {
        return vec!["none".to_owned()];
    }
    let line =
        |service: &super::services::Service| format!("{} {}: {}", service.kind, service.name, service.state);
    figures.services.iter().map(line).collect()
}

pub(super) fn help() -> Vec<String> {
    let keys = [
        "q, Esc, Ctrl-C   quit",
        "h, ?             this help",
        "s                sort owners by blocks, age, tokens, shared blocks, sequence",
        "up, down, pages  scroll the owners",
        "d                defragment: compact the pool now",
        "p, space         pause: keep the figures; again: go on",
        "",
        "The bar and the map have a character for each class:",
    ];
    let classes = CLASSES.iter().map(|class| format!("  {}  {}", class.symbol, class.name));
    let mixed = format!("  {MIXED}  mixed: no class has half of the frames");
    keys.iter().map(|&key| key.to_owned()).chain(classes).chain([mixed]).collect()
}
