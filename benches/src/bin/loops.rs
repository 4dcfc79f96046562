//! Runs one path of allocate and free `n` times and nothing else, for `instructions.sh` to count.

use std::hint::black_box;

use kvpool_benches::subject::{Handles, Leases, Listed, Parking, Queued, RawHandles, Standard};
use kvpool_benches::{Subject, Worker};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let count = arguments.next().and_then(|count| count.parse().ok());
    let Some(count) = count else { usage() };
    match path.as_str() {
        "lease" => one::<Leases>(count),
        "raw" => one::<RawHandles>(count),
        "handle" => one::<Handles>(count),
        "ten" => ten::<RawHandles>(count),
        "std-mutex" => one::<Listed<Standard>>(count),
        "parking-lot" => one::<Listed<Parking>>(count),
        "array-queue" => one::<Listed<Queued>>(count),
        _ => usage(),
    }
}

fn usage() -> ! {
    eprintln!("usage: loops <lease | raw | handle | ten | std-mutex | parking-lot | array-queue> <count>");
    std::process::exit(2)
}

fn one<S: Subject>(count: u64) {
    let subject = S::new(4096);
    let mut worker = subject.worker();
    for _ in 0..count {
        let block = black_box(worker.allocate());
        worker.free(block);
    }
}

fn ten<S: Subject>(count: u64) {
    let subject = S::new(4096);
    let mut worker = subject.worker();
    for owner in 0..count {
        let blocks = black_box(worker.allocate_many(10, owner));
        worker.free_many(blocks);
    }
}
