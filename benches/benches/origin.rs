//! The benchmark scenario of the design on which this project is based, with time per call.
//!
//! A pool of 10,000 blocks of 16 tokens. First 1,000 allocations of 10 blocks, which fill it, then
//! their frees. Then 1,000 allocations of 1 to 32 blocks, every second of which frees the first
//! half of its blocks at once; when the pool is full the oldest is freed. The fragmentation rate is
//! the share of free blocks outside free aligned runs of 16, on average over these calls while at
//! least one block in twenty is free (a full pool has no free runs, however it is managed).
//! Targets: 20 us per allocation, 10 us per free, 10 %.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use kvpool_benches::check::{Owners, check};
use kvpool_benches::report::{Times, fragmentation};
use kvpool_benches::subject::{Leases, Listed, Parking, Queued, Splits, Standard};
use kvpool_benches::{Subject, Worker};

const BLOCKS: usize = 10_000;
const ROUNDS: usize = 30;
const ORDER: u32 = 4;

fn main() {
    println!("10,000 blocks of 16 tokens; times per call in ns, {ROUNDS} rounds");
    println!(
        "{:<24} {:<16} {:>7} {:>7} {:>9}   {:>7} {:>7} {:>9}  fragmented",
        "", "", "median", "p99", "max", "median", "p99", "max"
    );
    report::<Leases>();
    report::<Listed<Standard>>();
    report::<Listed<Parking>>();
    report::<Listed<Queued>>();
}

fn report<S: Subject>()
where
    for<'a> S::Worker<'a>: Splits,
{
    check::<S>(2);
    let mut tens = Calls::default();
    let mut mixed = Calls::default();
    let mut rate = 0.0;
    for round in 0..ROUNDS {
        let subject = S::new(BLOCKS);
        let mut worker = subject.worker();
        let blocks = ten_by_ten(&mut worker, &mut tens);
        assert_eq!(blocks, BLOCKS, "{}: the pool was not filled", S::NAME);
        assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
        rate += one_to_32(&subject, &mut worker, round as u64, &mut mixed) / ROUNDS as f64;
        drop(worker);
        assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
    }
    println!("{:<24} {:<16} {}", S::NAME, "10 blocks", tens);
    println!("{:<24} {:<16} {}  {:>9.1}%", "", "1..=32 blocks", mixed, rate * 100.0);
}

fn ten_by_ten<W: Worker>(worker: &mut W, calls: &mut Calls) -> usize {
    let owners = Owners::new(BLOCKS + 1);
    let mut held = Vec::with_capacity(1_000);
    for owner in 0..1_000 {
        held.push(calls.allocate(|| worker.allocate_many(10, owner)));
    }
    held.iter().for_each(|blocks| W::ids(blocks, &mut |id| owners.take(id)));
    for blocks in held {
        calls.free(|| worker.free_many(blocks));
    }
    owners.iter().filter(|owned| *owned).count()
}

/// Returns the mean fragmentation rate.
fn one_to_32<S: Subject>(subject: &S, worker: &mut S::Worker<'_>, seed: u64, calls: &mut Calls) -> f64
where
    for<'a> S::Worker<'a>: Splits,
{
    let mut random = fastrand::Rng::with_seed(seed);
    let mut held = VecDeque::new();
    let (mut rates, mut samples) = (0.0, 0);
    for owner in 0..1_000 {
        let count = random.usize(1..=32);
        while subject.free_blocks() < count {
            let oldest = held.pop_front().expect("blocks are held");
            calls.free(|| worker.free_many(oldest));
        }
        let mut blocks = calls.allocate(|| worker.allocate_many(count, owner));
        if owner % 2 == 0 && count > 1 {
            calls.free(|| worker.free_first_half(&mut blocks));
        }
        held.push_back(blocks);
        if owner % 20 == 19 && subject.free_blocks() > BLOCKS / 20 {
            rates += fragmentation(&owned::<S>(&held), ORDER);
            samples += 1;
        }
    }
    held.into_iter().for_each(|blocks| calls.free(|| worker.free_many(blocks)));
    rates / f64::from(samples)
}

/// Returns for each position whether its block is held. Counted from block 1 if block 0 is never
/// handed out: its position is taken.
fn owned<'a, S: Subject + 'a>(held: &VecDeque<<S::Worker<'a> as Worker>::Blocks>) -> Vec<bool> {
    let mut owned = vec![false; BLOCKS];
    for blocks in held {
        <S::Worker<'a> as Worker>::ids(blocks, &mut |id| {
            if let Some(owned) = owned.get_mut(id as usize) {
                assert!(!*owned, "block {id} has two owners");
                *owned = true;
            }
        });
    }
    owned
}

/// Times of single calls, including about 20 ns of the clock itself.
#[derive(Default)]
struct Calls {
    allocate: Vec<std::time::Duration>,
    free: Vec<std::time::Duration>,
}

impl Calls {
    fn allocate<R>(&mut self, call: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = black_box(call());
        self.allocate.push(start.elapsed());
        result
    }

    fn free(&mut self, call: impl FnOnce()) {
        let start = Instant::now();
        call();
        self.free.push(start.elapsed());
    }
}

impl std::fmt::Display for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}   {}", Times::of(self.allocate.clone()), Times::of(self.free.clone()))
    }
}
