use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment};
use indicatif::HumanCount;
use kvpool_policies::simulate::{Prompts, Rate, Rates, Requests, chart, draw, measure};
use serde_json::{Value, json};

use super::workload::progress_bar;
use crate::args::PolicyArgs;
use crate::error::{not_written, output_failed};
use crate::fit;
use crate::output::{self, Destination, complain, print};
use crate::prompts::prompts;
use crate::trace::{HashIds, ReadOptions, Trace};
use crate::{EXIT_OK, EXIT_UNSOUND};

/// Measures policies on traces, and prints the hit rates.
pub fn policy(args: &PolicyArgs) -> anyhow::Result<u8> {
    let mut traces = Vec::new();
    let options = ReadOptions { hash_ids: HashIds::Required, ..args.format.read_options() };
    for path in &args.traces {
        let trace = Trace::load(path, &options)?;
        if trace.has_no_hash_ids() {
            anyhow::bail!(
                "{}: no request has hash_ids, which identify common prefixes of prompts (traces in JSON have them)",
                trace.name
            );
        }
        if trace.out_of_order > 0 {
            let lines = HumanCount(trace.out_of_order as u64);
            complain(format_args!("{}: {lines} lines are out of order", trace.name));
        }
        let prompts = prompts(&trace, args.running.unwrap_or_default());
        traces.push((trace.name, prompts));
    }
    let cannot = |error| not_written(args.plot.as_deref().unwrap_or("".as_ref()))(error);
    // Checked before the work.
    let plot = args.plot.as_deref().map(Destination::new).transpose().map_err(cannot)?;
    let prompts: Vec<&Prompts> = traces.iter().map(|(_, prompts)| prompts).collect();
    let requests = if args.running.is_some() { Requests::Running } else { Requests::AtOnce };
    let bar = progress_bar((prompts.len() * args.policies.len() * args.capacities.len()) as u64);
    let rates = measure(&prompts, &args.policies, &args.capacities, requests, || bar.inc(1));
    bar.finish_and_clear();
    if let Some(plot) = plot {
        // The picture is shared, so it omits local paths.
        let file = |path: &String| {
            Path::new(path).file_name().map_or(path.clone(), |name| name.to_string_lossy().into_owned())
        };
        let named: Vec<_> = traces.iter().map(|(path, _)| file(path)).zip(rates.iter().cloned()).collect();
        plot.write(&draw(&named)).map_err(cannot)?;
    }
    let traced = traces.iter().zip(&rates);
    let text = if args.json {
        let rows = traced.flat_map(|((trace, _), rates)| rates.iter().flatten().map(|rate| row(trace, rate)));
        format!("{:#}", rows.collect::<Value>())
    } else {
        traced
            .map(|((name, prompts), rates)| section(name, prompts, rates, fit::width()))
            .collect::<Vec<_>>()
            .join("\n\n")
    };
    print(&text).map_err(output_failed)?;
    let mut code = EXIT_OK;
    for (name, _) in traces.iter().filter(|(_, prompts)| prompts.distinct() == prompts.total()) {
        complain(format_args!("{name}: no block occurs twice, so no policy can hit"));
        code = EXIT_UNSOUND;
    }
    Ok(code)
}

fn row(trace: &str, rate: &Rate) -> Value {
    json!({
        "trace": trace,
        "policy": rate.contender.name(),
        "capacity_share": rate.share,
        "capacity_blocks": rate.blocks,
        "hit_rate": rate.hit_rate,
    })
}

/// Renders the rates of a trace: a heading, a table, and a chart if the terminal is wide enough.
fn section(name: &str, prompts: &Prompts, rates: &Rates, width: Option<usize>) -> String {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let names = rates.iter().filter_map(|policy| Some(Cell::new(policy.first()?.contender)));
    table.set_header(["capacity share", "capacity blocks"].into_iter().map(Cell::new).chain(names));
    for (at, first) in rates.first().into_iter().flatten().enumerate() {
        let capacity =
            [format!("{} %", (first.share * 1e5).round() / 1e3), HumanCount(first.blocks as u64).to_string()];
        let figures = rates.iter().map(|policy| right(format!("{:.3}", policy[at].hit_rate)));
        table.add_row(capacity.map(right).into_iter().chain(figures));
    }
    let heading = format!(
        "{name}: {} requests, {} blocks, {} of them distinct",
        HumanCount(prompts.requests() as u64),
        HumanCount(prompts.total() as u64),
        HumanCount(prompts.distinct() as u64),
    );
    let chart = Some(chart(rates)).filter(|chart| width.is_none_or(|width| fit::columns(chart) <= width));
    let parts = [fit::text(&heading, width), fit::table(table, width)];
    parts.into_iter().chain(chart).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}
