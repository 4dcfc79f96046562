use std::ops::ControlFlow;

use super::interrupt;
use super::sweep::sweep;
use super::workload::{Workload, progress_bar, show};
use crate::args::{ReplayArgs, Switch};
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
    let all: Vec<ReplayArgs> = std::iter::once(args.clone()).chain(args.agents()).collect();
    let (text, code) = replay_all(&all)?;
    print(&text).map_err(output_failed)?;
    Ok(code)
}

/// Replays one after the other. Returns what to print, and the exit code.
fn replay_all(all: &[ReplayArgs]) -> anyhow::Result<(String, u8)> {
    interrupt::catch();
    let mut reports: Vec<Report> = Vec::new();
    for args in all {
        if reports.is_empty() || !interrupt::is_interrupted() {
            reports.push(Report { is_brief: !reports.is_empty(), ..report(args)? });
        }
    }
    let codes: Vec<u8> = reports.iter().map(exit_code).collect();
    let text = if all[0].json {
        let agents = reports.get(1).map(|report| report.figures.clone());
        reports[0].figures["agents"] = agents.unwrap_or_default();
        format!("{:#}", reports[0].figures)
    } else {
        let tables: Vec<String> = reports.iter().map(|report| render(report, fit::width())).collect();
        tables.join("\n\n")
    };
    let worst = [EXIT_UNSOUND, EXIT_INTERRUPTED].into_iter().find(|code| codes.contains(code));
    Ok((text, worst.unwrap_or(EXIT_OK)))
}

fn report(args: &ReplayArgs) -> anyhow::Result<Report> {
    let free_list = args.free_list()?;
    let mut workload_args = args.workload.clone();
    if let (Some(_), None, None) =
        (args.sessions.sessions, args.workload.prefix.prefix_cache, args.workload.prefix.policy)
    {
        workload_args.prefix.prefix_cache = Some(Switch::On);
    }
    let at_once = args.sessions.sessions.map(|sessions| sessions as usize);
    let workload = Workload::of_sessions(&workload_args, &args.model, at_once)?;
    let blocks_max = args.resize_at.iter().flat_map(|schedule| &schedule.0).map(|(_, blocks)| *blocks).max();
    let pool = workload.pool(blocks_max.unwrap_or(0))?;
    Ok(replay_on(&pool, &workload, args, free_list))
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
    let options = match args.sessions.options() {
        Some(sessions) => options.with_sessions(trace, sessions),
        None => options,
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
        (Workload::of_model(&args.workload, &args.model).unwrap(), args)
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

    /// Agents follow conversations where no flag chooses the requests or the pool.
    #[test]
    fn the_built_in_workload_is_conversations_and_agents() {
        let agents = |command: &str| parse(command).1.agents();
        let of_agents = agents("kvpool replay --threads 1 --seed 3 --json").expect("agents");
        assert_eq!((of_agents.sessions.sessions, of_agents.workload.threads), (Some(16), Some(1)));
        assert!(of_agents.agents().is_none());
        for chosen in [
            "--requests 9",
            "--load agents",
            "--sessions 2",
            "--policy lru",
            "--resize-at 50%:1",
            "--window 64",
        ] {
            assert!(agents(&format!("kvpool replay {chosen}")).is_none(), "{chosen}");
        }
        let all = |json: &str| {
            ["", " --sessions 4"].map(|more| parse(&format!("kvpool replay --requests 200{more}{json}")).1)
        };
        let (text, code) = replay_all(&all(" --json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (code, &json["trace"], &json["sessions"]),
            (0, &json!("conversations (seed 0)"), &Value::Null)
        );
        let agents = &json["agents"];
        assert_eq!(
            (&agents["trace"], &agents["sessions"]["at_once"]),
            (&json!("agents (seed 0)"), &json!(4))
        );
        for report in [&json, agents] {
            assert_eq!(
                (&report["sound"], &report["audit"], &report["completed"]),
                (&json!(true), &json!("ok"), &json!(200))
            );
            assert!(report["tokens_verified"].as_u64() > report["tokens"].as_u64());
        }
        let (text, _) = replay_all(&all("")).unwrap();
        let [conversations, agents] = text.split("\n\n").collect::<Vec<_>>().try_into().unwrap();
        for (part, has) in [(conversations, true), (agents, false)] {
            assert!(part.ends_with("nothing lost, nothing corrupt "), "{part}");
            assert_eq!(part.contains("at first refusal"), has, "{part}");
            assert_eq!(part.contains("recomputed tokens"), !has, "{part}");
        }
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
