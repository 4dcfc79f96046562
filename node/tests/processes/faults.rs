//! The tests: every fault at every step of a migration.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use crate::case::Case;
use crate::fault::{ACTIONS, Action, Fault, Kind, STEPS, When};

/// Selects the cases whose names contain its value, and prints what happened in them.
const SELECTED: &str = "KVPOOL_FAULTS";

/// Cases that run at the same time: they wait for most of their time.
const AT_ONCE: usize = 12;

const ALL: [Kind; 3] = [Kind::Migrate, Kind::Replicate, Kind::Offload];

/// Of copies a smaller set: the target's side is that of a migration, and the source has no doubt.
const FEWER: [Action; 3] = [Action::KillSource, Action::KillTarget, Action::CutLong];

/// Returns all cases of a kind.
fn all(kind: Kind) -> Vec<Fault> {
    let (whens, actions): (&[When], &[Action]) = match kind {
        Kind::Migrate => (&[When::Before, When::After], &ACTIONS),
        _ => (&[When::Before], &FEWER),
    };
    let mut faults = Vec::new();
    for &step in &STEPS {
        for &when in whens {
            faults.extend(actions.iter().map(|&action| Fault { kind, step, when, action }));
        }
    }
    faults
}

/// Runs all cases of a kind, and fails with the stories of those that fail; also if no case ended in one
/// of these ways, because then they check less than they say.
fn run_all(kind: Kind, reached: &[&str]) {
    let selected = std::env::var(SELECTED).ok();
    let is_selected = |fault: &Fault| selected.as_ref().is_none_or(|text| fault.to_string().contains(text));
    assert!(ALL.iter().flat_map(|kind| all(*kind)).any(|one| is_selected(&one)), "no case is {selected:?}");
    let faults: Vec<Fault> = all(kind).into_iter().filter(is_selected).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.unwrap();
    let (next, failed, began) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Instant::now());
    let ends = Mutex::new(BTreeMap::<String, usize>::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&fault) = faults.get(next.fetch_add(1, Relaxed)) {
                    match run_one(fault, runtime.handle(), selected.is_some()) {
                        Ok(end) => *ends.lock().unwrap().entry(end).or_default() += 1,
                        Err(story) => failed.lock().unwrap().push(format!("{fault}: {story}")),
                    }
                }
            });
        }
    });
    println!("{} cases in {:?}", faults.len(), began.elapsed());
    let ends = ends.into_inner().unwrap();
    ends.iter().for_each(|(end, count)| println!("{count:>6} {end}"));
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), faults.len(), failed.join("\n"));
    let missed: Vec<_> = reached.iter().filter(|end| !ends.contains_key(**end)).collect();
    assert!(missed.is_empty() || selected.is_some(), "no case ended so: {missed:?}");
}

fn run_one(fault: Fault, runtime: &tokio::runtime::Handle, is_loud: bool) -> Result<String, String> {
    let mut case = None;
    let ran = catch_unwind(AssertUnwindSafe(|| case.insert(Case::start(fault, runtime)).run()));
    let story = case.as_ref().map_or(String::new(), Case::story);
    if is_loud {
        println!("{fault}\n{story}");
    }
    ran.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        format!("{text}\n{story}")
    })
}

#[test]
fn a_sequence_survives_every_fault_at_every_step() {
    let reached = [
        "the source has it",
        "the source has it, after a doubt",
        "the target has it",
        "the target has it, after a doubt",
        "lost with the source",
        "lost with the target",
    ];
    run_all(Kind::Migrate, &reached);
}

#[test]
fn a_sequence_that_is_copied_survives() {
    run_all(Kind::Replicate, &["there is a copy", "there is no copy"]);
}

#[test]
fn cached_blocks_survive() {
    let reached = ["cached at the source", "cached at the target", "cached nowhere"];
    run_all(Kind::Offload, &reached);
}
