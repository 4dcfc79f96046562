//! What `foresight` is worth on workloads on which its constants were not chosen.
//!
//! For each workload the constants are those that do best on all others: of the candidates that are
//! nowhere more than [`BELOW_MAX`] below LRU there, the one that closes most of the gap between LRU
//! and the clairvoyant policy. Printed are the results on the workload that was left out; the
//! choice with nothing left out, which is the policy's default; and its results on workloads of
//! other seeds.
//!
//! The conversation trace is read from the folder that `KVPOOL_TRACES` names, or from
//! `../shared/traces` beside the project, and left out with a message where there is none.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use kvpool_cli::prompts::prompts;
use kvpool_cli::trace::{HashIds, ReadOptions, Trace};
use kvpool_cli::workload::Conversations;
use kvpool_policies::simulate::workloads::{Workload, workloads};
use kvpool_policies::simulate::{Contender, Prompts, Requests, hit_rate_of};
use kvpool_policies::{Foresight, Tuning};

/// Capacities, as shares of the distinct blocks of a workload.
const SHARES: [f64; 6] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4];

/// The largest part of LRU's hit rate that candidates may lose at any capacity: half of what the
/// policy may lose.
const BELOW_MAX: f64 = 0.0025;

/// Seeds of workloads of the same kinds, on which nothing is chosen.
const FRESH_SEEDS: [u64; 3] = [1, 2, 3];

/// Milliseconds per token of an answer: then running requests hold as much of a pool as they do in
/// `kvpool replay --threads 2`.
const TOKEN_MS: u64 = 14;

/// The hit rates at one capacity of one workload.
struct Cell {
    workload: usize,
    requests: Requests,
    blocks: usize,
    lru: f64,
    bound: f64,
    /// By candidate.
    foresight: Vec<f64>,
}

fn candidates() -> Vec<Tuning> {
    let mut all = Vec::new();
    for memory_lookups in [256.0, 512.0] {
        for margin in [1.15, 1.3] {
            for (step, class_guess) in
                [(0.015, 20.0), (0.0075, 20.0), (0.03, 20.0), (0.015, 10.0), (0.03, 10.0)]
            {
                all.push(Tuning { step, class_guess, memory_lookups, margin });
            }
        }
    }
    all
}

fn conversation_trace() -> Option<Prompts> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let folder = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join("mooncake_conversation.jsonl");
    if !path.is_file() {
        eprintln!("SKIPPED: {} is not there; KVPOOL_TRACES names its directory", path.display());
        return None;
    }
    let options = ReadOptions { hash_ids: HashIds::Required, ..ReadOptions::default() };
    Some(prompts(&Trace::load(&path, &options).expect("a readable trace"), TOKEN_MS))
}

/// Measures all candidates on all workloads, on all cores.
fn measure(workloads: &[(String, Prompts)], candidates: &[Tuning]) -> Vec<Cell> {
    let cells = |workload: usize| {
        [Requests::AtOnce, Requests::Running].map(|requests| SHARES.map(|share| (workload, requests, share)))
    };
    let jobs: Vec<_> = (0..workloads.len()).flat_map(cells).flatten().collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&(workload, requests, share)) = jobs.get(next.fetch_add(1, Relaxed)) {
                    let prompts = &workloads[workload].1;
                    let blocks = prompts.capacity(share);
                    let rate = |contender: Contender| match requests {
                        Requests::Running => contender.running_hit_rate(prompts, blocks).expect("it runs"),
                        Requests::AtOnce => contender.hit_rate(prompts, blocks),
                    };
                    let tuned =
                        |&tuning| hit_rate_of(&Foresight::tuned(blocks, tuning), prompts, blocks, requests);
                    let foresight = candidates.iter().map(tuned).collect();
                    let (lru, bound) = (rate(Contender::LRU), rate(Contender::Clairvoyant));
                    let cell = Cell { workload, requests, blocks, lru, bound, foresight };
                    done.lock().expect("no measurement panicked").push(cell);
                    eprint!(".");
                }
            });
        }
    });
    eprintln!();
    let mut cells = done.into_inner().expect("no measurement panicked");
    cells.sort_by_key(|cell| (cell.workload, cell.requests == Requests::Running, cell.blocks));
    cells
}

/// Returns the hit rate relative to LRU's.
fn relative(cell: &Cell, candidate: usize) -> f64 {
    if cell.lru > 0.0 { cell.foresight[candidate] / cell.lru - 1.0 } else { 0.0 }
}

/// Returns the lowest hit rate relative to LRU's, and the mean share of the gap that is closed: a
/// workload counts once, whatever its gaps.
fn score<'a>(cells: impl Iterator<Item = &'a Cell>, workloads: usize, candidate: usize) -> (f64, f64) {
    let (mut worst, mut sums) = (0f64, vec![(0.0, 0.0); workloads]);
    for cell in cells {
        worst = worst.min(relative(cell, candidate));
        let (won, gap) = &mut sums[cell.workload];
        *won += cell.foresight[candidate] - cell.lru;
        *gap += (cell.bound - cell.lru).max(0.0);
    }
    let closed: Vec<f64> = sums.iter().filter(|(_, gap)| *gap > 0.0).map(|(won, gap)| won / gap).collect();
    (worst, closed.iter().sum::<f64>() / closed.len().max(1) as f64)
}

/// Returns the best candidate on all workloads but one.
fn choose(cells: &[Cell], workloads: usize, candidates: usize, left_out: Option<usize>) -> usize {
    let scored = (0..candidates).map(|candidate| {
        let (worst, closed) =
            score(cells.iter().filter(|cell| Some(cell.workload) != left_out), workloads, candidate);
        // Where none is good enough, the one that loses least.
        let is_good = worst >= -BELOW_MAX;
        (is_good, if is_good { closed } else { worst }, candidate)
    });
    scored.max_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))).expect("candidates").2
}

/// Prints a row for each workload, with the results of the candidate that `chosen` gives for it.
/// Returns the lowest hit rate relative to LRU's.
fn print(all: &[(String, Prompts)], cells: &[Cell], chosen: impl Fn(usize) -> usize) -> f64 {
    let mut worst = 0f64;
    let mut head = "| workload | requests |".to_owned();
    SHARES.iter().for_each(|share| write!(head, " {} % |", share * 100.0).expect("a string"));
    println!("{head} gap closed |\n|{}", "---|".repeat(SHARES.len() + 3));
    for (number, (name, _)) in all.iter().enumerate() {
        for (requests, label) in [(Requests::AtOnce, "at once"), (Requests::Running, "running")] {
            let row = || cells.iter().filter(|cell| cell.workload == number && cell.requests == requests);
            let mut line = format!("| {name} | {label} |");
            for cell in row() {
                let relative = relative(cell, chosen(number));
                worst = worst.min(relative);
                let rate = cell.foresight[chosen(number)];
                write!(line, " {:.3} → {rate:.3} ({:+.1} %) |", cell.lru, 100.0 * relative)
                    .expect("a string");
            }
            let (_, closed) = score(row(), all.len(), chosen(number));
            println!("{line} {:.0} % |", 100.0 * closed);
        }
    }
    worst
}

fn main() {
    let mut all = Vec::new();
    all.extend(conversation_trace().map(|prompts| ("the conversation trace".to_owned(), prompts)));
    let named = |workload: Workload| (workload.name.to_owned(), workload.prompts);
    let conversations = |seed| {
        (
            "`kvpool`'s generated conversations".to_owned(),
            prompts(&Conversations::trace(seed, 8000), TOKEN_MS),
        )
    };
    all.push(conversations(0));
    all.extend(workloads(0).into_iter().map(named));
    let candidates = candidates();
    let cells = measure(&all, &candidates);
    let chosen: Vec<usize> =
        (0..all.len()).map(|number| choose(&cells, all.len(), candidates.len(), Some(number))).collect();
    println!("Left out:\n");
    let worst = print(&all, &cells, |number| chosen[number]);
    println!("\nThe lowest relative to LRU: {:+.2} %. The constants:", 100.0 * worst);
    for ((name, _), &chosen) in all.iter().zip(&chosen) {
        println!("- without {name}: {:?}", candidates[chosen]);
    }
    for (number, tuning) in candidates.iter().enumerate() {
        let (worst, closed) = score(cells.iter(), all.len(), number);
        eprintln!("{number}: {tuning:?}: {:+.2} %, {:.1} % closed", 100.0 * worst, 100.0 * closed);
    }
    let chosen = candidates[choose(&cells, all.len(), candidates.len(), None)];
    println!("- with nothing left out: {chosen:?}\n- the policy's default: {:?}", Tuning::default());

    println!("\nOther seeds, with the constants chosen with nothing left out:\n");
    let mut fresh = Vec::new();
    for seed in FRESH_SEEDS {
        fresh.push(conversations(seed));
        fresh.extend(workloads(seed).into_iter().map(named));
    }
    let worst = print(&fresh, &measure(&fresh, &[chosen]), |_| 0);
    println!("\nThe lowest relative to LRU: {:+.2} %", 100.0 * worst);
}
