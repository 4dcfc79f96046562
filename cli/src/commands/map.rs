use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use indicatif::{BinaryBytes, HumanCount};
use kvpool::compact::{DefragReport, Snapshot};
use kvpool_map::{Group, Picture, draw};

use super::workload::{Workload, progress_bar, show};
use crate::args::MapArgs;
use crate::error::{not_written, output_failed, unsound};
use crate::fit;
use crate::output::{Destination, complain, print, printable};
use crate::replay::{self, Options, Outcome, ReplayPool};
use crate::report::keeps;
use crate::{EXIT_OK, EXIT_UNSOUND};

/// A halted pool, before and after a defragmentation.
struct Look {
    settled: u64,
    before: Snapshot,
    report: DefragReport,
    after: Snapshot,
}

/// Replays up to a point, and draws the pool there.
pub fn map(args: &MapArgs) -> anyhow::Result<u8> {
    let workload = Workload::of_model(&args.workload, &args.model)?;
    let pool = workload.pool(workload.blocks)?;
    // Checked before the work.
    let destination = Destination::new(&args.output).map_err(not_written(&args.output))?;

    let Workload { trace, threads, .. } = &workload;
    let options = Options {
        halt_at: Some(args.at),
        free_list: !args.model.has_groups(),
        step_tokens: args.model.step_tokens(),
        ..Options::new(trace, *threads)
    };
    let bar = progress_bar(trace.requests.len() as u64);
    let mut look = None;
    let outcome = replay::replay(&pool, trace, &options, |progress| {
        show(&bar, progress);
        if progress.is_halted {
            look = Some(Look::take(&pool, progress.settled));
        }
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let nothing = || Err(outcome.tally.findings.join("; "));
    let look = match look {
        // A pool without tokens shows nothing.
        Some(look) if outcome.tally.tokens > 0 => look,
        _ => nothing(),
    };
    let look = look.map_err(|reason| unsound(format_args!("nothing was drawn: {reason}")))?;

    destination.write(&draw(&look.picture(args, &workload, &pool))).map_err(not_written(&args.output))?;
    say(&look, &outcome, args).map_err(output_failed)?;
    Ok(judge(&outcome))
}

impl Look {
    fn take(pool: &ReplayPool, settled: u64) -> Result<Self, String> {
        // Magazines are emptied first, so that the panels differ only by the moves.
        pool.trim();
        let before = pool.snapshot();
        let report = pool.wait(pool.defragment()).map_err(|error| error.to_string())?;
        Ok(Self { settled, before, report, after: pool.snapshot() })
    }

    fn picture(&self, args: &MapArgs, workload: &Workload, pool: &ReplayPool) -> Picture<'_> {
        let (report, trace) = (&self.report, &workload.trace);
        let run = self.before.order().frames();
        let threads = match workload.threads {
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        };
        let replayed = format!(
            "After {} of {} requests ({}): {} blocks of {}, {}, {}.",
            HumanCount(self.settled),
            HumanCount(trace.requests.len() as u64),
            args.at,
            HumanCount(workload.blocks as u64),
            match &args.model.model {
                // Those of one group may have other tokens than those of another.
                Some(_) => BinaryBytes(pool.block_bytes()).to_string(),
                None => format!("{} tokens", workload.shape.block_tokens),
            },
            match &args.model.model {
                Some(model) => format!("model {}", printable(&file_name(model))),
                None => format!("layout {}", args.workload.layout),
            },
            threads,
        );
        let did = format!(
            "The defragmentation moved {} blocks ({}) in {:.1} ms; given up: {}. Fragmentation is the share of the free blocks that are in no whole run of {}.",
            HumanCount(report.moved_blocks as u64),
            BinaryBytes(report.moved_bytes),
            report.time.as_secs_f64() * 1e3,
            report.given_up,
            run,
        );
        let group = |group: &replay::Group| Group {
            caption: group.keeps.iter().map(|&reach| keeps(reach)).collect::<Vec<_>>().join(", "),
            lists: group.lists.clone(),
        };
        Picture {
            title: trace.name.clone(),
            notes: vec![replayed, did],
            panels: vec![("Before", &self.before), ("After", &self.after)],
            groups: pool.groups().iter().filter(|group| !group.lists.is_empty()).map(group).collect(),
        }
    }
}

fn say(look: &Look, outcome: &Outcome, args: &MapArgs) -> io::Result<()> {
    let Look { before, report, after, .. } = look;
    let order = before.order();
    let fragmentation = [before, after].map(|snapshot| 100.0 * snapshot.fragmentation(order));
    let available = [before, after].map(|snapshot| 100.0 * snapshot.available_fragmentation(order));
    let runs = [before, after].map(|snapshot| HumanCount(snapshot.free_runs(order) as u64));
    let in_list = match args.model.has_groups() {
        true => String::new(),
        false => format!(" ({:.1} in a queue of single blocks)", outcome.tally.listed.mean_len()),
    };
    let text = format!(
        "{}: fragmentation {:.1} % -> {:.1} % (with evictable blocks as free {:.1} % -> {:.1} %), free runs of {} {} -> {}, mean sequence run {:.1} -> {:.1}{}, moved blocks {} in {:.1} ms",
        printable(&args.output.display().to_string()),
        fragmentation[0],
        fragmentation[1],
        available[0],
        available[1],
        order.frames(),
        runs[0],
        runs[1],
        before.mean_sequence_run(),
        after.mean_sequence_run(),
        in_list,
        HumanCount(report.moved_blocks as u64),
        report.time.as_secs_f64() * 1e3,
    );
    print(&fit::text(&text, fit::width()))
}

/// Returns the name of the file of a configuration, or the name of a model.
fn file_name(model: &str) -> String {
    Path::new(model).file_name().map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Returns the exit code, and prints faults on the standard error.
fn judge(outcome: &Outcome) -> u8 {
    if outcome.is_intact() {
        return EXIT_OK;
    }
    let (tally, audit) = (&outcome.tally, outcome.audit.as_ref().err());
    complain(format_args!(
        "NOT SOUND: {} blocks corrupt, {} leaked",
        tally.corrupt.len(),
        outcome.blocks_leaked.max(tally.blocks_allocated.abs_diff(tally.blocks_freed) as usize)
    ));
    tally.findings.iter().chain(audit).for_each(|finding| complain(format_args!("{finding}")));
    EXIT_UNSOUND
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::tests::{Fault, pool};
    use crate::trace::Generated;

    /// From one wrong bit in memory to the exit code, though the replay does not finish.
    #[test]
    fn one_flipped_bit_ends_in_exit_code_1() {
        let trace = Generated::Conversations.trace(0, 60);
        for (fault, code) in [(Fault::None, EXIT_OK), (Fault::FlippedBit, EXIT_UNSOUND)] {
            let at = "80%".parse().unwrap();
            let options = Options { halt_at: Some(at), ..Options::new(&trace, 2) };
            let outcome = replay::replay(&pool(6000, fault), &trace, &options, |_| ControlFlow::Continue(()));
            assert_eq!(judge(&outcome), code, "{fault:?}: {outcome:?}");
        }
    }
}
