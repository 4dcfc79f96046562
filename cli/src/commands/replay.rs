//! `kvpool replay`.

use std::io::{self, Write};

use super::CommandError;
use super::workload::{Workload, progress_bar, show};
use crate::args::ReplayArgs;
use crate::replay::{self, Memory, Options};
use crate::report::{Report, Subject, render};
use crate::{EXIT_OK, EXIT_UNSOUND};

/// Replays a trace, prints the report and returns the exit code.
///
/// # Errors
///
/// [`CommandError`]: no such trace or layout, a pool that cannot be built, or a report that cannot be printed.
pub fn replay(args: &ReplayArgs) -> Result<u8, CommandError> {
    let workload = Workload::new(&args.workload)?;
    let blocks_max = args.resize_at.as_ref().and_then(|schedule| schedule.blocks_max()).unwrap_or(0);
    let memory = workload.pool(blocks_max)?;

    let report = replay_on(&memory, &workload, args);
    print(&report, args.json).map_err(CommandError::Output)?;
    Ok(exit_code(&report))
}

fn exit_code(report: &Report) -> u8 {
    if report.sound { EXIT_OK } else { EXIT_UNSOUND }
}

fn replay_on<M: Memory>(memory: &M, workload: &Workload, args: &ReplayArgs) -> Report {
    let Workload { trace, shape, threads, .. } = workload;
    let options = Options {
        verify: !args.no_verify,
        compaction: args.compaction.compaction(),
        schedule: args.resize_at.clone().unwrap_or_default(),
        ..Options::new(trace, *threads)
    };
    let bar = progress_bar(trace.requests.len() as u64);
    let blocks = memory.blocks();
    let outcome = replay::replay(memory, *shape, trace, &options, |progress| show(&bar, progress));
    bar.finish_and_clear();
    let subject = Subject {
        trace: &trace.name,
        requests: trace.requests.len(),
        span: trace.span(),
        layout: &args.workload.layout,
        shape: *shape,
        blocks,
        threads: *threads,
    };
    Report::new(&subject, &outcome)
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
    use crate::replay::Shape;
    use crate::replay::ledger::{Fault, Ledger};
    use clap::Parser;

    fn report(fault: Fault) -> Report {
        let Command::Replay(args) = Cli::parse_from(["kvpool", "replay", "--requests", "60"]).command else {
            panic!("another command");
        };
        let shape = Shape { layers: 1, k_bytes: 8, v_bytes: 8, block_tokens: 16 };
        let mut workload = Workload::new(&args.workload).unwrap();
        workload.shape = shape;
        replay_on(&Ledger::new(shape, workload.blocks, fault), &workload, &args)
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
}
