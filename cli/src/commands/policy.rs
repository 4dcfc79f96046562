//! `kvpool policy`.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Attribute, Cell, CellAlignment};
use indicatif::HumanCount;
use serde::Serialize;

use super::CommandError;
use super::workload::progress_bar;
use crate::args::PolicyArgs;
use crate::output::{self, Destination, complain, print};
use crate::policy::{Contender, Prompts, Rate, chart, draw};
use crate::trace::{HashIds, ReadOptions, Trace};
use crate::{EXIT_OK, EXIT_UNSOUND};

/// One row of the JSON.
#[derive(Serialize)]
struct JsonRate<'a> {
    trace: &'a str,
    policy: &'static str,
    capacity_share: f64,
    capacity_blocks: usize,
    hit_rate: f64,
}

/// Measures policies on traces, prints what they came to and returns the exit code.
pub fn policy(args: &PolicyArgs) -> Result<u8, CommandError> {
    let mut traces = Vec::new();
    let options = ReadOptions { format: args.format, hash_ids: HashIds::Required, ..ReadOptions::default() };
    for path in &args.traces {
        let trace = Trace::load(path, &options)?;
        let prompts = Prompts::new(&trace).ok_or_else(|| CommandError::NoHashIds(trace.name.clone()))?;
        if trace.out_of_order > 0 {
            let lines = HumanCount(trace.out_of_order as u64);
            complain(format_args!("{}: {lines} lines stood after a later one", trace.name));
        }
        traces.push((trace.name, prompts));
    }
    let cannot = |error| CommandError::File { path: args.plot.clone().unwrap_or_default(), error };
    // Checked before the work.
    let plot = args.plot.as_deref().map(Destination::new).transpose().map_err(cannot)?;
    let rates = measure(&traces, &args.policies, &args.capacities);
    if let Some(plot) = plot {
        // A picture is shown to others, without the paths of this machine.
        let file = |path: &String| {
            Path::new(path).file_name().map_or(path.clone(), |name| name.to_string_lossy().into_owned())
        };
        let named: Vec<_> = traces.iter().map(|(path, _)| file(path)).zip(rates.iter().cloned()).collect();
        plot.write(&draw(&named)).map_err(cannot)?;
    }
    let text = if args.json {
        json(&traces, &rates).map_err(|error| CommandError::Output(error.into()))?
    } else {
        (traces.iter().zip(&rates))
            .map(|((name, prompts), rates)| section(name, prompts, rates))
            .collect::<Vec<_>>()
            .join("\n\n")
    };
    print(&text).map_err(CommandError::Output)?;
    let mut code = EXIT_OK;
    for (name, _) in traces.iter().filter(|(_, prompts)| prompts.distinct() == prompts.total()) {
        complain(format_args!(
            "{name}: no block comes twice, so that nothing can hit and nothing was measured"
        ));
        code = EXIT_UNSOUND;
    }
    Ok(code)
}

/// The rates of each trace, by policy and capacity, on all cores.
fn measure(traces: &[(String, Prompts)], policies: &[Contender], capacities: &[f64]) -> Vec<Vec<Vec<Rate>>> {
    let jobs: Vec<(&Prompts, Contender, f64)> = (traces.iter())
        .flat_map(|(_, prompts)| policies.iter().map(move |&policy| (prompts, policy)))
        .flat_map(|(prompts, policy)| capacities.iter().map(move |&share| (prompts, policy, share)))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![None; jobs.len()]));
    let bar = progress_bar(jobs.len() as u64);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..cores.min(jobs.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    let Some(&(prompts, contender, share)) = jobs.get(at) else { break };
                    let blocks = prompts.capacity(share);
                    let hit_rate = contender.hit_rate(prompts, blocks);
                    let rate = Rate { contender, share, blocks, hit_rate };
                    done.lock().expect("no measurement panicked")[at] = Some(rate);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let done = done.into_inner().expect("no measurement panicked");
    let rates: Vec<Rate> = done.into_iter().map(|rate| rate.expect("every job was done")).collect();
    let by_policy: Vec<Vec<Rate>> = rates.chunks(capacities.len()).map(<[_]>::to_vec).collect();
    by_policy.chunks(policies.len()).map(<[_]>::to_vec).collect()
}

fn json(traces: &[(String, Prompts)], rates: &[Vec<Vec<Rate>>]) -> serde_json::Result<String> {
    let rows: Vec<JsonRate<'_>> = (traces.iter().zip(rates))
        .flat_map(|((trace, _), rates)| rates.iter().flatten().map(move |rate| (trace, rate)))
        .map(|(trace, rate)| JsonRate {
            trace,
            policy: rate.contender.name(),
            capacity_share: rate.share,
            capacity_blocks: rate.blocks,
            hit_rate: rate.hit_rate,
        })
        .collect();
    serde_json::to_string_pretty(&rows)
}

/// What a trace came to: a table, and a chart.
fn section(name: &str, prompts: &Prompts, rates: &[Vec<Rate>]) -> String {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    let names = rates.iter().filter_map(|policy| Some(policy.first()?.contender));
    table.set_header(["capacity share", "capacity blocks"].into_iter().map(Cell::new).chain(names.map(
        |contender| {
            let cell = Cell::new(contender.name());
            if contender == Contender::FORESIGHT { cell.add_attribute(Attribute::Bold) } else { cell }
        },
    )));
    for at in 0..rates.first().map_or(0, Vec::len) {
        let row: Vec<&Rate> = rates.iter().map(|policy| &policy[at]).collect();
        let Some(first) = row.first() else { continue };
        let figures = row.iter().map(|rate| {
            let cell = Cell::new(format!("{:.3}", rate.hit_rate)).set_alignment(CellAlignment::Right);
            if rate.contender == Contender::FORESIGHT { cell.add_attribute(Attribute::Bold) } else { cell }
        });
        let capacity = Cell::new(format!("{} %", (first.share * 1e5).round() / 1e3));
        let blocks = Cell::new(HumanCount(first.blocks as u64));
        table.add_row(
            [capacity, blocks]
                .map(|cell| cell.set_alignment(CellAlignment::Right))
                .into_iter()
                .chain(figures),
        );
    }
    let heading = format!(
        "{name}: {} requests, {} blocks, {} of them distinct",
        HumanCount(prompts.requests() as u64),
        HumanCount(prompts.total() as u64),
        HumanCount(prompts.distinct() as u64),
    );
    format!("{heading}\n{table}\n{}\n{}", closed(rates), chart(rates)).replace("\n\n", "\n")
}

/// Returns how much of the gap between LRU and the bound foresight closes, if all three are there.
fn closed(rates: &[Vec<Rate>]) -> String {
    let of = |contender| {
        rates.iter().find(|policy| policy.first().is_some_and(|rate| rate.contender == contender))
    };
    let (Some(lru), Some(foresight), Some(bound)) =
        (of(Contender::LRU), of(Contender::FORESIGHT), of(Contender::Clairvoyant))
    else {
        return String::new();
    };
    let gaps: Vec<(f64, f64)> = (lru.iter().zip(foresight).zip(bound))
        .map(|((lru, foresight), bound)| (foresight.hit_rate - lru.hit_rate, bound.hit_rate - lru.hit_rate))
        .filter(|&(_, gap)| gap > 0.0)
        .collect();
    if gaps.is_empty() {
        return String::new();
    }
    let mean = gaps.iter().map(|(won, gap)| won / gap).sum::<f64>() / gaps.len() as f64;
    let (won, gap) = gaps.iter().fold((0.0, 0.0), |(won, gap), row| (won + row.0, gap + row.1));
    format!(
        "of what lies between lru and clairvoyant, {} closes {:.1} % (mean of the rows: {:.1} %)",
        Contender::FORESIGHT,
        100.0 * won / gap,
        100.0 * mean
    )
}
