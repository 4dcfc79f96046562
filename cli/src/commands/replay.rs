use std::ops::ControlFlow;

use super::interrupt;
use super::sweep::sweep;
use super::workload::{Workload, progress_bar, show};
use crate::args::ReplayArgs;
use crate::error::output_failed;
use crate::fit;
use crate::output::print;
use crate::replay::{self, Options, ReplayPool};
use crate::report::{Report, render};
use crate::{EXIT_INTERRUPTED, EXIT_OK, EXIT_UNSOUND};

/// Replays a trace, and prints the report.
pub fn replay(args: &ReplayArgs) -> anyhow::Result<u8> {
    if args.comparison.sweep {
        return sweep(args);
    }
    let free_list = args.free_list()?;
    let workload = Workload::of_model(&args.workload, &args.model)?;
    let blocks_max = args.resize_at.iter().flat_map(|schedule| &schedule.0).map(|(_, blocks)| *blocks).max();
    let pool = workload.pool(blocks_max.unwrap_or(0))?;

    interrupt::catch();
    let report = replay_on(&pool, &workload, args, free_list);
    let text = if args.json { format!("{:#}", report.figures) } else { render(&report, fit::width()) };
    print(&text).map_err(output_failed)?;
    Ok(exit_code(&report))
}

/// Returns the exit code. A fault found before an interrupt takes precedence.
fn exit_code(report: &Report) -> u8 {
    if report.figures["interrupted"] == true && report.intact {
        EXIT_INTERRUPTED
    } else if report.figures["sound"] == true {
        EXIT_OK
    } else {
        EXIT_UNSOUND
    }
}

fn replay_on(pool: &ReplayPool, workload: &Workload, args: &ReplayArgs, free_list: bool) -> Report {
    let Workload { trace, threads, .. } = workload;
    let options = Options {
        verify: !args.no_verify,
        compaction: args.compaction.compaction(),
        schedule: args.resize_at.clone().unwrap_or_default(),
        free_list,
        step_tokens: args.model.step_tokens(),
        ..Options::new(trace, *threads)
    };
    let bar = progress_bar(trace.requests.len() as u64);
    let outcome = replay::replay(pool, trace, &options, |progress| {
        show(&bar, progress);
        if interrupt::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    Report::new(trace, (&args.workload.layout, args.model.model.as_deref()), pool, &options, &outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::replay::tests::{Fault, pool};
    use clap::Parser;
    use serde_json::{Value, json};

    fn parse(command: &str) -> (Workload, ReplayArgs) {
        let Command::Replay(args) = Cli::parse_from(command.split(' ')).command else {
            panic!("another command");
        };
        (Workload::new(&args.workload).unwrap(), args)
    }

    fn with(report: &Report, changes: Value) -> Report {
        let mut report = report.clone();
        for (name, value) in changes.as_object().unwrap() {
            report.figures[name] = value.clone();
        }
        report
    }

    /// From one wrong bit in memory to the exit code and the last line of the table.
    #[test]
    fn one_flipped_bit_ends_in_exit_code_1() {
        let (workload, args) = parse("kvpool replay --requests 60 --no-defrag");
        let report = |fault| replay_on(&pool(workload.blocks, fault), &workload, &args, true);
        let sound = report(Fault::None);
        assert_eq!((exit_code(&sound), &sound.figures["blocks_corrupt"]), (0, &json!(0)));
        assert!(render(&sound, None).ends_with("nothing lost, nothing corrupt "));
        let unverified = Report { verify: false, ..sound.clone() };
        assert!(render(&unverified, None).ends_with("nothing lost; no token was read back "));
        let interrupted = with(&sound, json!({"interrupted": true, "completed": 7}));
        assert_eq!(exit_code(&interrupted), EXIT_INTERRUPTED);
        let said = render(&interrupted, None);
        assert!(
            said.ends_with("INTERRUPTED after 7 of 60 requests; until then nothing lost, nothing corrupt "),
            "{said}"
        );
        let flipped = report(Fault::FlippedBit);
        assert_eq!((exit_code(&flipped), &flipped.figures["blocks_corrupt"]), (1, &json!(1)));
        assert!(render(&flipped, None).contains("1 blocks corrupt"));
        assert_eq!(exit_code(&with(&flipped, json!({"interrupted": true}))), 1, "the fault counts more");
        let leaked = with(&sound, json!({"blocks_leaked": 1, "sound": false}));
        assert_eq!(exit_code(&leaked), 1);
        assert!(render(&leaked, None).contains("1 blocks leaked"));
    }

    /// The table has every figure, including those shown only if they occur.
    #[test]
    fn the_table_has_the_names_of_the_json() {
        let (workload, args) = parse("kvpool replay --requests 60 --policy lru --resize-at 50%:1");
        let mut report = replay_on(&workload.pool(0).unwrap(), &workload, &args, true);
        report.figures["prefix"]["resumed_lookup_blocks"] = 1.into();
        report.figures["defrag"]["runs"] = 1.into();
        report.figures["defrag"]["errors"] = json!(["an error"]);
        let table = render(&report, None);
        for label in ["resumed hit blocks", "fragmentation before", "an error", "at first refusal"] {
            assert!(table.contains(label), "no {label} in\n{table}");
        }
    }
}
