//! `kvpool replay`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::thread;

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvpool::storage::{Dtype, KvLayout, host_free_bytes};

use super::CommandError;
use crate::args::ReplayArgs;
use crate::replay::{self, Memory, Options, PoolMemory, Progress, Shape};
use crate::report::{Report, Subject, render};
use crate::trace::Trace;
use crate::workload::Conversations;
use crate::{EXIT_OK, EXIT_UNSOUND, complain};

/// The layout for replays: as few bytes a token as tell every token from every other, so that a replay measures the
/// pool and not the memory.
const PROBE: &str = "probe";

/// Made-up requests, if nobody says how many.
const REQUESTS_DEFAULT: usize = 30_000;

/// Replays a trace, prints the report and returns the exit code.
///
/// # Errors
///
/// [`CommandError`]: no such trace or layout, a pool that cannot be built, or a report that cannot be printed.
pub fn replay(args: &ReplayArgs) -> Result<u8, CommandError> {
    let layout = layout(&args.layout, args.block_tokens as usize)?;
    let trace = trace(args)?;
    let shape = Shape::of(&layout);
    let blocks =
        args.blocks.map_or_else(|| replay::blocks_for(&trace.requests, &shape), |blocks| blocks as usize);
    check_memory(&layout, blocks)?;
    let memory = PoolMemory::new(layout, blocks).map_err(|reason| CommandError::Pool { blocks, reason })?;

    let report = replay_on(&memory, shape, &trace, args);
    print(&report, args.json).map_err(CommandError::Output)?;
    Ok(exit_code(&report))
}

fn exit_code(report: &Report) -> u8 {
    if report.sound { EXIT_OK } else { EXIT_UNSOUND }
}

fn replay_on<M: Memory>(memory: &M, shape: Shape, trace: &Trace, args: &ReplayArgs) -> Report {
    let threads =
        args.threads.map_or_else(|| thread::available_parallelism().map_or(1, usize::from), usize::from);
    let options = Options { verify: !args.no_verify, ..Options::new(trace, threads) };
    let bar = progress_bar(trace.requests.len() as u64);
    let blocks = memory.blocks();
    let outcome = replay::replay(memory, shape, trace, &options, |progress| show(&bar, progress, blocks));
    bar.finish_and_clear();
    let subject = Subject {
        trace: &trace.name,
        requests: trace.requests.len(),
        span: trace.span(),
        layout: &args.layout,
        shape,
        blocks,
        threads,
    };
    Report::new(&subject, &outcome)
}

fn layout(name: &str, block_tokens: usize) -> Result<KvLayout, CommandError> {
    let builder = if name == PROBE {
        Ok(KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16))
    } else {
        KvLayout::named_builder(name)
    };
    builder
        .and_then(|builder| builder.block_tokens(block_tokens).build())
        .map_err(|reason| CommandError::Layout { name: name.to_owned(), reason })
}

fn trace(args: &ReplayArgs) -> Result<Trace, CommandError> {
    let requests = args.requests.map(|requests| requests as usize);
    match &args.trace {
        None => Ok(Conversations::trace(args.seed, requests.unwrap_or(REQUESTS_DEFAULT))),
        Some(path) => {
            let trace = Trace::load(path, args.format.format(), requests)?;
            if trace.out_of_order > 0 {
                let lines = HumanCount(trace.out_of_order as u64);
                complain(format_args!(
                    "{}: {lines} lines stood after a later one, and were sorted",
                    trace.name
                ));
            }
            let name = PathBuf::from(&trace.name);
            let name =
                name.file_name().map_or(trace.name.clone(), |file| file.to_string_lossy().into_owned());
            Ok(Trace { name, ..trace })
        }
    }
}

/// Bytes that a block costs beside its own: its row in the pool's table, which is rounded up to a power of two of rows,
/// its bits, and its place in the request that takes all blocks at the end.
const METADATA_BYTES: usize = 2 * 28 + 1 + 4;

/// Memory is given out page by page as it is written, so a pool that is too large would be found out midway.
fn check_memory(layout: &KvLayout, blocks: usize) -> Result<(), CommandError> {
    let block_bytes = layout.bytes_per_block().saturating_add(METADATA_BYTES);
    match host_free_bytes() {
        Some(free) if (block_bytes as u64).saturating_mul(blocks as u64) > free => {
            Err(CommandError::TooLarge { blocks, block_bytes, free })
        }
        _ => Ok(()),
    }
}

/// A bar on the standard error, if that is a terminal.
fn progress_bar(requests: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr());
    let style =
        "{bar:30.cyan/dim} {percent:>3} %  {human_pos}/{human_len} requests  {msg}  {elapsed}, {eta} to go";
    // The template is fixed, and a test draws it.
    bar.with_style(ProgressStyle::with_template(style).expect("a valid template"))
}

fn show(bar: &ProgressBar, progress: Progress, blocks: usize) {
    let used = 100.0 * (1.0 - progress.blocks_free as f64 / blocks as f64);
    bar.set_message(format!(
        "{} million tokens, pool {used:.0} % full",
        HumanCount(progress.tokens / 1_000_000)
    ));
    bar.set_position(progress.settled);
}

/// Prints the report. A reader who goes away early is no error.
fn print(report: &Report, json: bool) -> io::Result<()> {
    let text = if json { serde_json::to_string_pretty(report)? } else { render(report) };
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::replay::ledger::{Fault, Ledger};
    use clap::Parser;

    fn report(fault: Fault) -> Report {
        let Command::Replay(args) = Cli::parse_from(["kvpool", "replay", "--requests", "60"]).command;
        let trace = trace(&args).unwrap();
        let shape = Shape { layers: 1, k_bytes: 8, v_bytes: 8, block_tokens: 16 };
        let blocks = replay::blocks_for(&trace.requests, &shape);
        replay_on(&Ledger::new(shape, blocks, fault), shape, &trace, &args)
    }

    /// From one wrong bit in memory to the exit code and the last line of the table.
    #[test]
    fn one_flipped_bit_ends_in_exit_code_1() {
        let sound = report(Fault::None);
        assert_eq!((exit_code(&sound), sound.blocks_corrupt), (0, 0));
        assert!(render(&sound).ends_with("nothing lost, nothing corrupt "));
        let flipped = report(Fault::FlippedBit);
        assert_eq!((exit_code(&flipped), flipped.blocks_corrupt), (1, 1));
        assert!(render(&flipped).contains("1 blocks corrupt"));
        let leaked = report(Fault::Leak);
        assert_eq!((exit_code(&leaked), leaked.blocks_leaked), (1, 1));
    }

    #[test]
    fn the_bar_can_be_drawn() {
        let bar = progress_bar(10);
        show(&bar, Progress { settled: 3, tokens: 5_000_000, blocks_free: 5 }, 10);
        assert_eq!(bar.message(), "5 million tokens, pool 50 % full");
    }

    #[test]
    fn every_layout_has_a_shape() {
        for name in KvLayout::names().chain([PROBE]) {
            let layout = layout(name, 16).unwrap();
            let shape = Shape::of(&layout);
            assert_eq!(shape.layers * (shape.k_bytes + shape.v_bytes) * 16, layout.packed_bytes(), "{name}");
        }
        assert!(layout("no-such-model", 16).is_err());
    }
}
