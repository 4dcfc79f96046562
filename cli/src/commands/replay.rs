//! `kvpool replay`.

use std::ops::ControlFlow;

use super::workload::{Workload, progress_bar, show};
use super::{CommandError, interrupt};
use crate::args::ReplayArgs;
use crate::output::print;
use crate::replay::{self, Memory, Options};
use crate::report::{Report, Subject, render};
use crate::{EXIT_INTERRUPTED, EXIT_OK, EXIT_UNSOUND};

/// Replays a trace, prints the report and returns the exit code.
///
/// # Errors
///
/// [`CommandError`]: no such trace or layout, a pool that cannot be built, or a report that cannot be printed.
pub fn replay(args: &ReplayArgs) -> Result<u8, CommandError> {
    let workload = Workload::new(&args.workload)?;
    let blocks_max = args.resize_at.as_ref().and_then(|schedule| schedule.blocks_max()).unwrap_or(0);
    let memory = workload.pool(blocks_max)?;

    interrupt::catch();
    let report = replay_on(&memory, &workload, args);
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(|error| CommandError::Output(error.into()))?
    } else {
        render(&report)
    };
    print(&text).map_err(CommandError::Output)?;
    Ok(exit_code(&report))
}

/// The exit code. A fault that was found before an interrupt counts more than the interrupt.
fn exit_code(report: &Report) -> u8 {
    match report {
        Report { interrupted: true, intact: true, .. } => EXIT_INTERRUPTED,
        Report { sound: true, .. } => EXIT_OK,
        _ => EXIT_UNSOUND,
    }
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
    let outcome = replay::replay(memory, *shape, trace, &options, |progress| {
        show(&bar, progress);
        if interrupt::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let subject = Subject {
        trace: &trace.name,
        requests: trace.requests.len(),
        span: trace.span(),
        layout: &args.workload.layout,
        shape: *shape,
        blocks,
        threads: *threads,
        verify: options.verify,
    };
    Report::new(&subject, &outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::replay::Shape;
    use crate::replay::ledger::{Fault, Ledger};
    use crate::report::names;
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
        let unverified = Report { verify: false, ..sound.clone() };
        assert!(render(&unverified).ends_with("nothing lost; no token was read back "));
        let interrupted = Report { interrupted: true, completed: 7, ..sound.clone() };
        assert_eq!(exit_code(&interrupted), EXIT_INTERRUPTED);
        let said = render(&interrupted);
        assert!(
            said.ends_with("INTERRUPTED after 7 of 60 requests; until then nothing lost, nothing corrupt "),
            "{said}"
        );
        let flipped = report(Fault::FlippedBit);
        assert_eq!((exit_code(&flipped), flipped.blocks_corrupt), (1, 1));
        assert!(render(&flipped).contains("1 blocks corrupt"));
        assert_eq!(exit_code(&Report { interrupted: true, ..flipped }), 1, "the fault counts more");
        let leaked = report(Fault::Leak);
        assert_eq!((exit_code(&leaked), leaked.blocks_leaked), (1, 1));
    }

    /// One name a figure: each of the table is the JSON's.
    #[test]
    fn the_table_has_the_names_of_the_json() {
        let command = "kvpool replay --requests 60 --policy lru --resize-at 50%:1";
        let Command::Replay(args) = Cli::parse_from(command.split(' ')).command else {
            panic!("another command");
        };
        let workload = Workload::new(&args.workload).unwrap();
        let mut report = replay_on(&workload.pool(0).unwrap(), &workload, &args);
        // Figures that are shown only where there are any.
        report.prefix.as_mut().unwrap().resumed_lookup_blocks = 1;
        report.defrag.as_mut().unwrap().runs = 1;
        let json = serde_json::to_value(&report).unwrap();
        let mut figures = 0;
        for (section, name) in names(&report) {
            let beside = if json[section].is_array() { &json[section][0] } else { &json[section] };
            let object = if beside.is_object() { beside } else { &json };
            assert!(object.get(name).is_some(), "{section}: no {name} in {object}");
            figures += 1;
        }
        assert!(figures > 25, "{figures}");
    }
}
