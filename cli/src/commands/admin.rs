//! The commands over a live pool: each sends one request to an admin interface and prints the
//! answer.

use comfy_table::CellAlignment;
use comfy_table::presets::{NOTHING, UTF8_FULL_CONDENSED};
use indicatif::{BinaryBytes, HumanCount};
use kvpool_node::admin::{
    AuditOutcome, Client, ClientError, DefragOutcome, MigrateOrder, MigrationList, MigrationRecord,
    ResizeOrder, ResizeOutcome, StatsReport,
};
use kvpool_node::settings::Token;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::CommandError;
use crate::args::{AdminArgs, MigrateArgs, ResizeArgs};
use crate::output::{self, printable};
use crate::{EXIT_OK, EXIT_UNSOUND};

/// Prints the statistics of a node.
pub fn stats(args: &AdminArgs) -> Result<u8, CommandError> {
    let answer = ask(args, Ask::Get("/stats"))?;
    show(args, &answer, |stats: &StatsReport| Ok(render_stats(stats)))
}

/// Compacts the pool of a node.
pub fn defrag(args: &AdminArgs) -> Result<u8, CommandError> {
    let answer = ask(args, Ask::Post("/defrag", json!({})))?;
    show(args, &answer, |outcome: &DefragOutcome| {
        let DefragOutcome { moved_blocks, time_ms, fragmentation_before, fragmentation_after, .. } = outcome;
        let (before, after) = (percent(100.0 * fragmentation_before), percent(100.0 * fragmentation_after));
        let given_up = match outcome.report.given_up.total() {
            0 => String::new(),
            _ => format!("; moves given up: {}", outcome.report.given_up),
        };
        let moved = HumanCount(*moved_blocks as u64);
        Ok(format!(
            "moved {moved} blocks in {time_ms:.2} ms; fragmentation {before} before, {after} after{given_up}"
        ))
    })
}

/// Changes the size of a node's pool.
pub fn resize(args: &ResizeArgs) -> Result<u8, CommandError> {
    let order = ResizeOrder { blocks: args.blocks as usize };
    let answer = ask(&args.admin, Ask::Post("/resize", json!(order)))?;
    show(&args.admin, &answer, |outcome: &ResizeOutcome| {
        let [from, to, moved] =
            [outcome.from, outcome.to, outcome.moved_blocks].map(|n| HumanCount(n as u64));
        Ok(format!("{from} blocks before, {to} after; moved {moved} blocks in {:.2} ms", outcome.time_ms))
    })
}

/// Migrates a sequence to another node.
pub fn migrate(args: &MigrateArgs) -> Result<u8, CommandError> {
    let order = MigrateOrder { sequence: args.sequence_id, to: args.target_node.clone() };
    let answer = ask(&args.admin, Ask::Post("/migrate", json!(order)))?;
    show(&args.admin, &answer, |record: &MigrationRecord| Ok(render_migrations(std::slice::from_ref(record))))
}

/// Prints the migrations of a node.
pub fn migration_status(args: &AdminArgs) -> Result<u8, CommandError> {
    let answer = ask(args, Ask::Get("/migrations"))?;
    show(args, &answer, |list: &MigrationList| Ok(render_migrations(&list.migrations)))
}

/// Recounts every frame of a node's pool.
pub fn audit(args: &AdminArgs) -> Result<u8, CommandError> {
    let answer = ask(args, Ask::Post("/audit", json!({})))?;
    let mut code = EXIT_OK;
    show(args, &answer, |outcome: &AuditOutcome| {
        Ok(match (&outcome.report, &outcome.finding) {
            (Some(report), _) if outcome.sound => {
                let [total, owned, evictable] =
                    [report.total, report.owned, report.evictable].map(|n| HumanCount(n as u64));
                format!("ok: {total} frames, {owned} of them owned and {evictable} evictable")
            }
            (_, finding) => format!("UNSOUND: {}", finding.as_deref().unwrap_or("no reason given")),
        })
    })?;
    if answer["sound"] != true {
        code = EXIT_UNSOUND;
    }
    Ok(code)
}

/// A request.
enum Ask {
    Get(&'static str),
    Post(&'static str, Value),
}

/// Sends a request and returns the answer.
fn ask(args: &AdminArgs, ask: Ask) -> Result<Value, CommandError> {
    let variable = || std::env::var_os("KVPOOL_TOKEN_FILE").map(Into::into);
    let token = match args.token_file.clone().or_else(variable) {
        Some(path) => Some(Token::read(&path)?),
        None => None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(CommandError::Output)?;
    let client = Client::new(args.url.clone(), token);
    let answer = runtime.block_on(async {
        match ask {
            Ask::Get(path) => client.get(path).await,
            Ask::Post(path, order) => client.post(path, &order).await,
        }
    });
    Ok(answer?)
}

/// Prints an answer, as it came or as text.
fn show<T: DeserializeOwned>(
    args: &AdminArgs,
    answer: &Value,
    render: impl FnOnce(&T) -> Result<String, CommandError>,
) -> Result<u8, CommandError> {
    let text = if args.json {
        format!("{answer:#}")
    } else {
        let reason = |error: serde_json::Error| ClientError::Foreign {
            url: args.url.clone(),
            reason: error.to_string(),
        };
        printable(&render(&serde_json::from_value(answer.clone()).map_err(reason)?)?)
    };
    output::print(&text).map_err(CommandError::Output)?;
    Ok(EXIT_OK)
}

fn render_stats(stats: &StatsReport) -> String {
    let count = |blocks: usize| HumanCount(blocks as u64).to_string();
    let nanoseconds = |ns: f64| match stats.allocation.samples {
        0 => "-".to_owned(),
        _ => format!("{} ns", HumanCount(ns.round() as u64)),
    };
    let gauges = &stats.metrics.stats;
    let bytes = BinaryBytes(stats.block_bytes as u64 * stats.total as u64);
    let rows = [
        ("total", count(stats.total), format!("blocks of {} tokens, {bytes}", stats.block_tokens)),
        ("used", count(stats.used), percent(stats.used_percent)),
        ("free", count(stats.free), format!("pressure {:?}", gauges.pressure).to_lowercase()),
        ("evictable", count(stats.evictable), "cached, without an owner".to_owned()),
        ("retired", count(gauges.retired), format!("{} batches in flight", gauges.batches_in_flight)),
        ("sequences", count(stats.sequences), format!("{} requests wait", gauges.waiting)),
        (
            "fragmentation",
            percent(100.0 * stats.fragmentation.rate),
            format!(
                "longest free run {}; {} over free and evictable blocks",
                count(stats.fragmentation.longest_run),
                percent(100.0 * stats.available_fragmentation)
            ),
        ),
        (
            "allocation mean",
            nanoseconds(stats.allocation.mean_ns),
            format!("{} samples", HumanCount(stats.allocation.samples)),
        ),
        ("allocation p99", nanoseconds(stats.allocation.p99_ns as f64), String::new()),
        (
            "moved",
            count(stats.metrics.moves.moved_blocks as usize),
            format!("in {} compactions and resizes", HumanCount(stats.metrics.moves.runs)),
        ),
    ];
    let mut table = output::table(NOTHING);
    table.add_rows(rows.iter().map(|(name, figure, note)| [*name, figure, note.as_str()]));
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text =
        format!("{} (kvpool {}), up {} s\n{}", stats.node, stats.version, stats.uptime_s, table.trim_fmt());
    for (name, counters) in &stats.extra {
        let counters = counters.as_object().into_iter().flatten();
        let counters: Vec<_> = counters.map(|(name, value)| entry(name, value)).collect();
        text += &format!("\n{name}: {}", counters.join(", "));
    }
    text
}

/// Returns a counter, or the state of something, as words.
fn entry(name: &str, value: &Value) -> String {
    match value.as_str() {
        Some(state) => format!("{name} {state}"),
        None => format!("{value} {}", name.replace('_', " ")),
    }
}

fn render_migrations(migrations: &[MigrationRecord]) -> String {
    if migrations.is_empty() {
        return "no migrations".to_owned();
    }
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table
        .set_header(["id", "kind", "side", "peer", "sequence", "state", "blocks", "bytes", "time", "reason"]);
    // The words of the JSON.
    let word = |value: &Value| value.as_str().unwrap_or_default().replace('_', " ");
    for record in migrations {
        table.add_row([
            record.id.clone(),
            word(&json!(record.kind)),
            word(&json!(record.side)),
            record.peer.clone(),
            record.sequence.map_or("-".to_owned(), |id| id.to_string()),
            word(&json!(record.state)),
            HumanCount(record.blocks as u64).to_string(),
            BinaryBytes(record.bytes).to_string(),
            format!("{} ms", record.time_ms),
            record.reason.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}

fn percent(value: f64) -> String {
    format!("{value:.1} %")
}
