use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment};
use indicatif::HumanCount;
use kvpool_policies::simulate::{Contender, Prompts, Rate, Rates, Requests, chart, draw, measure};
use serde_json::{Value, json};

use super::workload::progress_bar;
use crate::args::PolicyArgs;
use crate::error::{not_written, output_failed};
use crate::fit;
use crate::output::{self, Destination, complain, print};
use crate::prompts::{Pace, prompts};
use crate::trace::{HashIds, ReadOptions, Trace};
use crate::{EXIT_OK, EXIT_UNSOUND};

/// Milliseconds per token of an answer in sessions, and tokens of prompts computed per second.
const SESSIONS_TOKEN_MS: u64 = 15;
const SESSIONS_PREFILL_RATE: u64 = 10_000;

/// A trace as it is measured.
struct Measured {
    name: String,
    prompts: Prompts,
    /// Tokens per block.
    tokens: u32,
}

/// Measures policies on traces, and prints the hit rates.
pub fn policy(args: &PolicyArgs) -> anyhow::Result<u8> {
    let (pace, requests) = match args.sessions {
        Some(at_a_time) => {
            let token_ms = args.running.unwrap_or(SESSIONS_TOKEN_MS);
            let prefill_rate = args.prefill_rate.or(Some(SESSIONS_PREFILL_RATE));
            let (at_a_time, orders) = (at_a_time as usize, args.orders as u32);
            (Pace { token_ms, prefill_rate }, Requests::Sessions { at_a_time, orders })
        }
        None => {
            let requests = args.running.map_or(Requests::AtOnce, |_| Requests::Running);
            let token_ms = args.running.unwrap_or_default();
            (Pace { token_ms, prefill_rate: args.prefill_rate }, requests)
        }
    };
    let usual = if args.sessions.is_some() { &Contender::OF_SESSIONS[..] } else { &Contender::USUAL };
    let policies = args.policies.as_deref().unwrap_or(usual);
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
        if args.sessions.is_some() && trace.requests.iter().all(|request| request.turn.is_none()) {
            anyhow::bail!("{}: no request belongs to a session, so --sessions has no meaning", trace.name);
        }
        let prompts = prompts(&trace, pace);
        traces.push(Measured { name: trace.name, prompts, tokens: trace.hash_tokens });
    }
    let cannot = |error| not_written(args.plot.as_deref().unwrap_or("".as_ref()))(error);
    // Checked before the work.
    let plot = args.plot.as_deref().map(Destination::new).transpose().map_err(cannot)?;
    let prompts: Vec<&Prompts> = traces.iter().map(|trace| &trace.prompts).collect();
    let bar = progress_bar((prompts.len() * policies.len() * args.capacities.len()) as u64);
    let rates = measure(&prompts, policies, &args.capacities, requests, || bar.inc(1));
    bar.finish_and_clear();
    if let Some(plot) = plot {
        // The picture is shared, so it omits local paths.
        let file = |path: &String| {
            Path::new(path).file_name().map_or(path.clone(), |name| name.to_string_lossy().into_owned())
        };
        let named: Vec<_> = traces.iter().map(|trace| file(&trace.name)).zip(rates.iter().cloned()).collect();
        plot.write(&draw(&named)).map_err(cannot)?;
    }
    let traced = traces.iter().zip(&rates);
    let text = if args.json {
        let rows = traced.flat_map(|(trace, rates)| rates.iter().flatten().map(|rate| row(trace, rate)));
        format!("{:#}", rows.collect::<Value>())
    } else {
        traced
            .map(|(trace, rates)| section(trace, rates, args.sessions.is_some(), fit::width()))
            .collect::<Vec<_>>()
            .join("\n\n")
    };
    print(&text).map_err(output_failed)?;
    let mut code = EXIT_OK;
    for trace in traces.iter().filter(|trace| trace.prompts.distinct() == trace.prompts.total()) {
        complain(format_args!("{}: no block occurs twice, so no policy can hit", trace.name));
        code = EXIT_UNSOUND;
    }
    Ok(code)
}

/// Returns the tokens of prompts that were computed again.
fn recomputed(trace: &Measured, rate: &Rate) -> Option<f64> {
    rate.recomputed.map(|share| (share * trace.prompts.total() as f64 * f64::from(trace.tokens)).round())
}

fn row(trace: &Measured, rate: &Rate) -> Value {
    let mut row = json!({
        "trace": trace.name,
        "policy": rate.contender.name(),
        "capacity_share": rate.share,
        "capacity_blocks": rate.blocks,
        "hit_rate": rate.hit_rate,
    });
    if let Some(tokens) = recomputed(trace, rate) {
        row["recomputed_tokens"] = tokens.into();
    }
    row
}

/// Renders the rates of a trace: a heading, a table, and a chart if the terminal is wide enough.
fn section(trace: &Measured, rates: &Rates, is_of_sessions: bool, width: Option<usize>) -> String {
    let Measured { name, prompts, .. } = trace;
    let mut table = output::table(UTF8_FULL_CONDENSED);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let names = rates.iter().filter_map(|policy| Some(Cell::new(policy.first()?.contender)));
    table.set_header(["capacity share", "capacity blocks"].into_iter().map(Cell::new).chain(names));
    for (at, first) in rates.first().into_iter().flatten().enumerate() {
        let capacity =
            [format!("{} %", (first.share * 1e5).round() / 1e3), HumanCount(first.blocks as u64).to_string()];
        let figure = |rate: &Rate| {
            let tokens = recomputed(trace, rate).filter(|_| is_of_sessions);
            let Some(tokens) = tokens else { return format!("{:.3}", rate.hit_rate) };
            let of_first = recomputed(trace, first).filter(|&first| first > 0.0).map(|first| tokens / first);
            let ratio = of_first.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
            format!("{} ({ratio})", HumanCount(tokens as u64))
        };
        table.add_row(
            capacity.map(right).into_iter().chain(rates.iter().map(|policy| right(figure(&policy[at])))),
        );
    }
    let heading = format!(
        "{name}: {} requests, {} blocks, {} of them distinct",
        HumanCount(prompts.requests() as u64),
        HumanCount(prompts.total() as u64),
        HumanCount(prompts.distinct() as u64),
    );
    let heading = if is_of_sessions {
        let sessions = HumanCount(prompts.sessions() as u64);
        format!(
            "{heading}; {sessions} sessions; recomputed tokens of prompts, and their ratio to the first policy's"
        )
    } else {
        heading
    };
    let chart = Some(chart(rates)).filter(|chart| width.is_none_or(|width| fit::columns(chart) <= width));
    let parts = [fit::text(&heading, width), fit::table(table, width)];
    parts.into_iter().chain(chart).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}
