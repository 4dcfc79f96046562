//! Scheduler steps of continuous batching with a prefix cache: kvpool compared with kvbm-logical
//! and an exact LRU behind a mutex, in one run. The steps are explained in `kvpool_benches::step`.
//!
//! kvbm-logical has no batches: closing a sequence frees its blocks at once.

use std::thread;

use kvpool_benches::reuse::{Engine, Kvpool, Locked, Turns, verify};
use kvpool_benches::step::{STEP_LINES, Threads};
use kvpool_benches::threads;
use kvpool_peers::KvbmReuse;

type Kvbm = KvbmReuse<true>;

const ROUNDS: usize = 31;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("step: to measure, run `cargo bench --bench step` here");
        return;
    }
    println!("{}", threads::pinning());
    verify::<Kvpool>();
    verify::<Locked>();
    verify::<Kvbm>();
    let turns = Turns::new([Kvpool::NAME, Locked::NAME, Kvbm::NAME]);
    turns.head("step, prefix cache on, us");
    let engines = (Threads::<Kvpool>::new(), Threads::<Locked>::new(), Threads::<Kvbm>::new());
    thread::scope(|scope| {
        let (ours, locked, kvbm) = (engines.0.start(scope), engines.1.start(scope), engines.2.start(scope));
        turns.measure(
            ROUNDS,
            STEP_LINES,
            [&mut || ours.round(), &mut || locked.round(), &mut || kvbm.round()],
        );
        ours.end();
        locked.end();
        kvbm.end();
    });
}
