//! The planner of compaction: its time by the size of the pool, and the quality of its plans.
//!
//! Pools with random holes of single frames: the worst case for finding runs. Blocks belong to
//! 2,000 sequences, a few neighbouring frames each, in ascending positions. First a table of the
//! effects of full plans, at no price of a break and at the default one; then the times, at the
//! default price.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvpool::compact::{FRAGMENTATION_PENALTY, FrameKind, FrameState, Goal, Snapshot, plan};
use kvpool::{FrameId, Order, Run, SequenceId};

const ORDER: Order = Order(4);
const GOAL: Goal = Goal::Fragmentation { order: ORDER };
const SEQUENCES: u32 = 2_000;
const SIZES: [usize; 4] = [1 << 14, 1 << 16, 1 << 18, 1 << 20];
const IN_USE: [u32; 4] = [50, 70, 85, 95];

/// Creates a pool of `frames` frames, `in_use` per cent of them in use; 1 % of all are fixed.
fn snapshot(frames: usize, in_use: u32) -> Snapshot {
    let mut random = fastrand::Rng::with_seed(u64::from(in_use));
    let mut places = vec![0; SEQUENCES as usize];
    let mut sequence = 0;
    let states = (0..frames).map(|_| {
        if random.u32(..8) == 0 {
            sequence = random.u32(..SEQUENCES);
        }
        let place = &mut places[sequence as usize];
        match random.u32(..100) {
            at if at >= in_use => FrameState::FREE,
            at => {
                *place += 1;
                let kind = if at == 0 { FrameKind::Fixed } else { FrameKind::Movable };
                FrameState::new(kind, Some((sequence, *place - 1)))
            }
        }
    });
    Snapshot::new(ORDER, states.collect(), (0..u64::from(SEQUENCES)).map(SequenceId).collect())
}

/// Prints the effects of full plans, checked by applying them.
fn worth(_: &mut Criterion) {
    println!(
        "{:>8} {:>7} {:>6} {:>8} {:>8} {:>10} {:>15} {:>15}",
        "frames", "in use", "price", "moves", "runs", "moves a run", "fragmentation", "mean run"
    );
    for frames in SIZES {
        for (in_use, price) in
            IN_USE.into_iter().flat_map(|in_use| [(in_use, 0), (in_use, FRAGMENTATION_PENALTY)])
        {
            let before = snapshot(frames, in_use);
            let full = plan(&before, GOAL, usize::MAX, price);
            let mut after = before.clone();
            after.apply(&full);
            assert_eq!(after.free_runs(ORDER) as isize, before.free_runs(ORDER) as isize + full.runs_gained);
            let more = plan(&after, GOAL, usize::MAX, price);
            assert!(price > 0 || more.moves.is_empty(), "a second plan finds more");
            println!(
                "{frames:>8} {in_use:>6}% {price:>6} {:>8} {:>8} {:>11.2} {:>6.1}% {:>6.1}% {:>7.2} {:>7.2}",
                full.moves.len(),
                full.runs_gained,
                full.moves.len() as f64 / full.runs_gained.max(1) as f64,
                100.0 * before.fragmentation(ORDER),
                100.0 * after.fragmentation(ORDER),
                before.mean_sequence_run(),
                after.mean_sequence_run(),
            );
        }
    }
}

/// Full plans by size and fill.
fn full(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan of order 4");
    for frames in SIZES {
        group.throughput(Throughput::Elements(frames as u64));
        for in_use in IN_USE {
            let before = snapshot(frames, in_use);
            let id = BenchmarkId::new(format!("{in_use} % in use"), frames);
            group.bench_with_input(id, &before, |bencher, before| {
                bencher.iter(|| plan(black_box(before), GOAL, usize::MAX, FRAGMENTATION_PENALTY));
            });
        }
    }
}

/// The requests of a background task: a wave, a run, a segment.
fn parts(c: &mut Criterion) {
    let before = snapshot(1 << 20, 85);
    let mut group = c.benchmark_group("plan for 1048576 frames, 85 % in use");
    let region = Run { start: FrameId((1 << 20) - 4096), len: 4096 };
    for (name, goal, moves_max) in [
        ("a wave of 256 moves", GOAL, 256),
        ("one run of 32", Goal::Run { len: 32 }, usize::MAX),
        ("the last 4096 frames", Goal::Empty { region }, usize::MAX),
    ] {
        assert!(
            !plan(&before, goal, moves_max, FRAGMENTATION_PENALTY).moves.is_empty(),
            "nothing to measure"
        );
        group.bench_function(name, |bencher| {
            bencher.iter(|| plan(black_box(&before), goal, moves_max, FRAGMENTATION_PENALTY))
        });
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = worth, full, parts
}
criterion_main!(benches);
