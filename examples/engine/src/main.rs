//! The program: serves a seeded storm, compares it with the reference, and prints a report.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kvpool_engine::config::ModelConfig;
use kvpool_engine::hybrid::storm::{HybridStorm, forks, states};
use kvpool_engine::model::Model;
use kvpool_engine::storm::{Report, Storm};
use kvpool_engine::weights::Weights;

/// Serves seeded requests from a pool that is compacted and resized, and compares every logit with
/// contiguous caches.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Prints the report as one JSON object
    #[arg(long)]
    json: bool,
    /// Seed of the requests, the resizes, and the random weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of requests
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// Worker threads; by default, one per core, at least two
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,
    /// Contiguous caches that fill the memory
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    slots: u16,
    /// Maximum number of tokens of a sequence
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..=65_536))]
    tokens_max: u32,
    /// Tokens per block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    block_tokens: u32,
    /// Leaves the pool alone: neither compaction nor resizes
    #[arg(long)]
    calm: bool,
    /// Serves two tiny models whose layers differ: one with states, one with forks; both with
    /// drafts
    #[arg(long, conflicts_with_all = ["slots", "tokens_max", "block_tokens", "weights"])]
    hybrid: bool,
    /// Weights of a Qwen2 or Llama model, in the safetensors format; random ones by default
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The model's config.json; by default, the one beside the weights
    #[arg(long, value_name = "FILE", requires = "weights")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let fail = |code: u8| {
        move |error: Box<dyn std::error::Error>| {
            eprintln!("error: {error}");
            ExitCode::from(code)
        }
    };
    if args.hybrid {
        return match serve_hybrid(&args).map_err(fail(1)) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(code) => code,
        };
    }
    // 2 for bad input, 1 for a storm that went wrong.
    let served = load(&args).map_err(fail(2)).and_then(|model| serve(&args, model).map_err(fail(1)));
    match served {
        Ok(report) if report.is_right() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(code) => code,
    }
}

/// Returns whether both models were served right.
fn serve_hybrid(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let runtime = runtime()?;
    let mut all_right = true;
    let mut reports = Vec::new();
    for (name, shapes) in [("states", states()), ("forks", forks())] {
        let storm = HybridStorm {
            seed: args.seed,
            requests: args.requests,
            workers: workers(args),
            blocks: 48 * workers(args).max(2),
            has_chaos: !args.calm,
        };
        let report = storm.run(name, shapes, runtime.handle())?;
        all_right &= report.is_right();
        reports.push(serde_json::to_value(report)?);
    }
    if args.json {
        println!("{}", serde_json::Value::from(reports));
    } else {
        reports.into_iter().for_each(print);
    }
    Ok(all_right)
}

fn load(args: &Args) -> Result<Model, Box<dyn std::error::Error>> {
    let (config, weights) = match &args.weights {
        None => (ModelConfig::small(), Weights::random(&ModelConfig::small(), args.seed)),
        Some(path) => {
            let beside = || path.with_file_name("config.json");
            let config = ModelConfig::read(&args.config.clone().unwrap_or_else(beside))?;
            let weights = Weights::load(&config, path)?;
            (config, weights)
        }
    };
    Ok(Model::new(config, weights, args.tokens_max as usize))
}

fn serve(args: &Args, model: Model) -> Result<Report, Box<dyn std::error::Error>> {
    let storm = Storm {
        seed: args.seed,
        requests: args.requests,
        workers: workers(args),
        slots: args.slots.into(),
        tokens_max: args.tokens_max as usize,
        block_tokens: args.block_tokens as usize,
        step_tokens: 64,
        has_chaos: !args.calm,
    };
    let report = runtime()?.block_on(storm.run(model))?;
    match serde_json::to_value(&report)? {
        fields if !args.json => print(fields),
        json => println!("{json}"),
    }
    Ok(report)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build()
}

fn workers(args: &Args) -> usize {
    let cores = std::thread::available_parallelism().map_or(2, usize::from).max(2);
    args.workers.map_or(cores, usize::from)
}

/// Prints the fields of a report, one a line.
fn print(report: serde_json::Value) {
    for (name, value) in report.as_object().into_iter().flatten() {
        println!("{name:>28}  {value}");
    }
}
