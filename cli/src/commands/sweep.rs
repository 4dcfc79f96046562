use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::thread;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use indicatif::{HumanCount, ProgressBar};
use kvpool_policies::simulate::{Curve, Look, Panel, picture};
use serde_json::{Value, json};

use super::interrupt;
use super::workload::{Workload, progress_bar};
use crate::args::{ModelArgs, ReplayArgs, Switch};
use crate::error::{not_written, output_failed, unsound};
use crate::fit;
use crate::output::{self, Destination, print};
use crate::replay::{self, Group, Options, TableRuns};
use crate::report::{keeps, runs};
use crate::{EXIT_INTERRUPTED, EXIT_OK};

/// Percentages of the pool that open sequences hold.
const USES: [usize; 6] = [30, 50, 65, 80, 90, 95];

/// Placements of blocks, by their names in the JSON.
const PLACEMENTS: [&str; 3] = ["cache_on", "cache_off", "free_list"];

/// The figures of one placement at one usage, by its index.
type Row = ((usize, usize), Value);

/// Replays at each usage, and prints a table.
pub fn sweep(args: &ReplayArgs) -> anyhow::Result<u8> {
    let mut workload_args = args.workload.clone();
    workload_args.prefix.prefix_cache = Some(Switch::On);
    let workload = Workload::of_model(&workload_args, &args.model)?;
    let plot = args.comparison.plot.as_deref();
    let cannot = |error| not_written(plot.unwrap_or("".as_ref()))(error);
    // Checked before the work.
    let plot_file = plot.map(Destination::new).transpose().map_err(cannot)?;

    interrupt::catch();
    let rows = measure(&workload, &args.model)?;
    if interrupt::is_interrupted() {
        return Ok(EXIT_INTERRUPTED);
    }
    let figures = json!({
        "trace": workload.trace.name,
        "requests": workload.trace.requests.len(),
        "block_tokens": workload.shape.block_tokens,
        "blocks_total": workload.blocks,
        "rows": rows,
    });
    if let Some(file) = plot_file {
        file.write(&draw(&workload.trace.name, &rows)).map_err(cannot)?;
    }
    let text = if args.json { format!("{figures:#}") } else { render(&workload, &rows, fit::width()) };
    print(&text).map_err(output_failed)?;
    Ok(EXIT_OK)
}

/// Replays at each usage with and without the cache, one replay per thread at a time.
fn measure(workload: &Workload, model: &ModelArgs) -> anyhow::Result<Vec<Value>> {
    // The fullest first: a trace may be too short for them.
    let jobs = [true, false].map(|caches| USES.map(|percent| (percent, caches))).concat();
    let bar = &progress_bar((jobs.len() * workload.trace.requests.len()) as u64);
    let share = |thread: usize| {
        let jobs = jobs.iter().rev().skip(thread).step_by(workload.threads);
        jobs.map(|&(percent, caches)| measure_at(workload, model, (percent, caches), bar)).collect()
    };
    let found: Result<Vec<Vec<Vec<Row>>>, _> = thread::scope(|scope| {
        let share = &share;
        let threads: Vec<_> =
            (0..workload.threads).map(|thread| scope.spawn(move || share(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    bar.finish_and_clear();
    let mut rows: Vec<_> = found?.into_iter().flatten().flatten().collect();
    rows.sort_by_key(|&(place, _)| place);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// Replays in a pool of which open sequences hold a share.
fn measure_at(
    workload: &Workload,
    model: &ModelArgs,
    (percent, caches): (usize, bool),
    bar: &ProgressBar,
) -> anyhow::Result<Vec<Row>> {
    let Workload { trace, blocks, .. } = workload;
    let pool = workload.pool_with(workload.eviction.filter(|_| caches), 0)?;
    let fill = Some((blocks * percent).div_ceil(100));
    let lists_free = caches && !model.has_groups();
    let step_tokens = model.step_tokens();
    let options =
        Options { verify: false, free_list: lists_free, fill, step_tokens, ..Options::new(trace, 1) };
    let mut settled = 0;
    let outcome = replay::replay(&pool, trace, &options, |progress| {
        bar.inc(progress.settled - settled);
        settled = progress.settled;
        if interrupt::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    if !outcome.is_intact() {
        let audit = outcome.audit.err();
        let findings: Vec<_> = outcome.tally.findings.into_iter().chain(audit).collect();
        return Err(unsound(format_args!("NOT SOUND: {}", findings.join("; "))));
    }
    let tally = outcome.tally;
    if tally.tables.per_sequence.count() == 0 && !outcome.interrupted {
        let [requests, blocks] = [trace.requests.len(), *blocks].map(|count| HumanCount(count as u64));
        anyhow::bail!(
            "--sweep: {requests} requests are too few: none begins after open sequences hold {percent} % of {blocks} \
             blocks, and ends before the last one begins (--requests, --blocks)"
        );
    }
    let row = |placement: usize, tables: &TableRuns, hits: u64| {
        let figures = json!({
            "use": percent as f64 / 100.0,
            "placement": PLACEMENTS[placement],
            // The mean share of the pool that open sequences held, after each step.
            "used_mean": tally.utilization.mean(),
            // Those that began after the pool was filled, and ended while others were to begin.
            "sequences": tables.per_sequence.count(),
            "run_len_mean": tables.mean_len(),
            "runs_per_sequence": runs(tables),
            "hit_rate": caches.then(|| hits as f64 / tally.lookup_blocks.max(1) as f64),
        });
        ((percent, placement), figures)
    };
    let list = lists_free.then(|| row(2, &tally.listed, tally.listed_hits));
    let (place, mut pool_row) = row(usize::from(!caches), &tally.tables, tally.hit_blocks);
    let of_groups = pool.groups().iter().filter(|group| !tally.lists.is_empty() && !group.lists.is_empty());
    let of_groups: Vec<_> = of_groups.map(|group| of_group(group, &tally.lists)).collect();
    if !of_groups.is_empty() {
        pool_row["groups"] = of_groups.into();
    }
    Ok([(place, pool_row)].into_iter().chain(list).collect())
}

/// Returns the figures of a group of layers: those of its lists, each moved by itself.
fn of_group(group: &Group, lists: &[TableRuns]) -> Value {
    let mut tables = TableRuns::default();
    lists[group.lists.clone()].iter().for_each(|list| tables.merge(list));
    json!({
        "keeps": group.keeps.iter().map(|&reach| keeps(reach)).collect::<Vec<_>>().join(" · "),
        "layers": group.layers,
        "lists": group.lists.len(),
        "run_len_mean": tables.mean_len(),
        "runs_per_list": runs(&tables),
    })
}

/// Returns a figure of a row; a share is from 0 to 1.
fn figure(row: &Value, pointer: &str) -> f64 {
    row.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0)
}

fn render(workload: &Workload, rows: &[Value], width: Option<usize>) -> String {
    let [requests, blocks] = [workload.trace.requests.len(), workload.blocks].map(|n| HumanCount(n as u64));
    let tokens = workload.shape.block_tokens;
    let heading = format!("{}: {requests} requests, {blocks} blocks of {tokens} tokens", workload.trace.name);
    let note = "use: the share of the pool in open sequences below which requests begin; mean run: \
                adjacent blocks of a sequence; runs: of a completed request, the descriptors of its transfer; \
                of a group of layers, those of one list";
    let table = match fit::table(table(rows, false), width) {
        grid if grid.contains('│') => grid,
        // Without a grid, each row stands alone.
        _ => fit::table(table(rows, true), width),
    };
    [fit::text(&heading, width), table, fit::text(note, width.or(Some(80)))].join("\n")
}

/// Returns the rows as a table. The three rows of a usage name it once, or each.
fn table(rows: &[Value], names_each: bool) -> Table {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header(["use", "mean use", "placement", "mean run", "runs p50", "runs p99", "hit rate"]);
    for (index, row) in rows.iter().enumerate() {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let is_named = names_each || index == 0 || rows[index - 1]["use"] != row["use"];
        let once = |text: String| right(if is_named { text } else { String::new() });
        let count = |pointer| right(HumanCount(figure(row, pointer) as u64).to_string());
        let percent = |pointer| format!("{:.1} %", 100.0 * figure(row, pointer));
        table.add_row([
            once(format!("{:.0} %", 100.0 * figure(row, "/use"))),
            once(percent("/used_mean")),
            Cell::new(row["placement"].as_str().unwrap_or_default().replace('_', " ")),
            right(format!("{:.1}", figure(row, "/run_len_mean"))),
            count("/runs_per_sequence/p50"),
            count("/runs_per_sequence/p99"),
            right(if row["hit_rate"].is_null() { "-".to_owned() } else { percent("/hit_rate") }),
        ]);
        for group in row["groups"].as_array().into_iter().flatten() {
            let count = |pointer| right(HumanCount(figure(group, pointer) as u64).to_string());
            table.add_row([
                Cell::new(""),
                Cell::new(""),
                Cell::new(format!("  {}", group["keeps"].as_str().unwrap_or_default())),
                right(format!("{:.1}", figure(group, "/run_len_mean"))),
                count("/runs_per_list/p50"),
                count("/runs_per_list/p99"),
                Cell::new(""),
            ]);
        }
    }
    table
}

/// Draws the mean run and the 99th percentile of the runs of a sequence, on logarithmic scales.
fn draw(trace: &str, rows: &[Value]) -> String {
    let [first, .., last] = USES.map(|percent| percent as f64 / 100.0);
    let along = |share: f64| (share - first) / (last - first);
    let panels = [
        ("mean run of a sequence, in blocks", "/run_len_mean"),
        ("runs of a sequence, p99", "/runs_per_sequence/p99"),
    ]
    .map(|(note, pointer)| {
        let highest = rows.iter().map(|row| figure(row, pointer)).fold(10.0, f64::max);
        let digits = highest.log10().ceil();
        let at = |row: &Value| (along(figure(row, "/use")), figure(row, pointer).max(1.0).log10() / digits);
        let curve = |placement: &str| Curve {
            name: placement.replace('_', " "),
            look: if placement == PLACEMENTS[0] { Look::Subject } else { Look::Other },
            points: rows.iter().filter(|row| row["placement"] == placement).map(at).collect(),
        };
        let power = |digit| (f64::from(digit) / digits, 10f64.powi(digit).to_string());
        Panel {
            title: trace.to_owned(),
            note: format!("{note}, by the share of the pool in open sequences"),
            columns: USES.map(|percent| (along(percent as f64 / 100.0), format!("{percent} %"))).to_vec(),
            rows: (0..=digits as i32).map(power).collect(),
            curves: PLACEMENTS.map(curve).into_iter().filter(|curve| !curve.points.is_empty()).collect(),
        }
    });
    picture("Contiguity by use", &panels)
}
