//! Placement of blocks during a long churn of concurrently growing sequences at 85 % occupancy.
//!
//! 131,072 blocks, all of them used once and freed in random order. Then a prompt takes 1 to 512
//! blocks in one call; every open sequence then grows by one block per round, round-robin, until it
//! has grown by up to 256; then all its blocks are freed, and prompts are admitted while less than
//! 85 % is in use. Reported over the last half: the mean run of a prompt's blocks (consecutive
//! numbers, one DMA descriptor each) and, at the end, the share of the free space in whole aligned
//! units of 64. Targets: over 70 blocks, over half.

use std::time::Instant;

use kvpool_benches::check::{Owners, check};
use kvpool_benches::report::{free_in_units, mean_run};
use kvpool_benches::subject::{Leases, Listed, Parking, Queued};
use kvpool_benches::{Subject, Worker};

const BLOCKS: usize = 131_072;
const ROUNDS: usize = 4_000;
const UNIT: usize = 64;

fn main() {
    println!("{BLOCKS} blocks, 85 % in use, {ROUNDS} rounds of growth by one block a sequence");
    println!("{:<24} {:>16} {:>22} {:>14}", "", "mean prompt run", "free in units of 64", "ns/block");
    report::<Leases>();
    report::<Listed<Parking>>();
    report::<Listed<Queued>>();
}

struct Sequence<B, G> {
    prompt: G,
    grown: Vec<B>,
    end: usize,
}

fn report<S: Subject>() {
    check::<S>(1);
    let subject = S::new(BLOCKS);
    let mut worker = subject.worker();
    let mut random = fastrand::Rng::with_seed(85);
    fill_and_scatter(&mut worker, &mut random);
    let mut live = Vec::new();
    let (mut in_use, mut allocated) = (0, 0_usize);
    let mut runs = Vec::new();
    let start = Instant::now();
    for round in 0..ROUNDS {
        while in_use < BLOCKS * 85 / 100 {
            let count = random.usize(100..1000);
            let prompt = worker.allocate_many(count, allocated as u64);
            in_use += count;
            allocated += count;
            if round >= ROUNDS / 2 {
                let mut ids = Vec::with_capacity(count);
                <S::Worker<'_> as Worker>::ids(&prompt, &mut |id| ids.push(id));
                ids.sort_unstable();
                runs.push((count, mean_run(&ids)));
            }
            live.push(Sequence { prompt, grown: Vec::new(), end: random.usize(20..220) });
        }
        let mut next = 0;
        while next < live.len() {
            let sequence = &mut live[next];
            if sequence.grown.len() < sequence.end {
                sequence.grown.push(worker.allocate());
                in_use += 1;
                allocated += 1;
                next += 1;
            } else {
                in_use -= release(&mut worker, live.swap_remove(next));
            }
        }
    }
    let elapsed = start.elapsed();

    let owners = Owners::new(BLOCKS + 1);
    for sequence in &live {
        <S::Worker<'_> as Worker>::ids(&sequence.prompt, &mut |id| owners.take(id));
        sequence.grown.iter().for_each(|block| owners.take(<S::Worker<'_> as Worker>::id(block)));
    }
    let owned: Vec<bool> = owners.iter().collect();
    let free = owned.iter().filter(|owned| !**owned).count();
    let in_units = free_in_units(&owned, UNIT) as f64 / free as f64;
    let prompts: usize = runs.iter().map(|(count, _)| count).sum();
    let pieces: f64 = runs.iter().map(|(count, mean)| *count as f64 / mean).sum();
    println!(
        "{:<24} {:>16.1} {:>21.1}% {:>14.1}",
        S::NAME,
        prompts as f64 / pieces,
        in_units * 100.0,
        elapsed.as_nanos() as f64 / allocated as f64
    );
    live.into_iter().for_each(|sequence| {
        release(&mut worker, sequence);
    });
    drop(worker);
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// Fills the pool once, and empties it in random order.
fn fill_and_scatter<W: Worker>(worker: &mut W, random: &mut fastrand::Rng) {
    let mut held: Vec<_> = (0..BLOCKS).map(|_| worker.allocate()).collect();
    random.shuffle(&mut held);
    held.into_iter().for_each(|block| worker.free(block));
}

/// Frees everything, and returns the number of blocks.
fn release<W: Worker>(worker: &mut W, sequence: Sequence<W::Block, W::Blocks>) -> usize {
    let mut blocks = sequence.grown.len();
    W::ids(&sequence.prompt, &mut |_| blocks += 1);
    worker.free_many(sequence.prompt);
    worker.free_each(sequence.grown);
    blocks
}
