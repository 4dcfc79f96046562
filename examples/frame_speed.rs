//! Measures the frame floor on one thread: nanoseconds per claim and free by shape, and the
//! placement in a pool of 131,072 frames after a churn. `cargo run --release --example frame_speed`
#![cfg(not(kvpool_loom))]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvpool::frame::{FrameConfig, Frames};
use kvpool::{FrameId, Order, Run};

include!("support/side_by_side.rs");

const FRAMES: usize = 131_072;

/// Creates a pool that is half full, with holes: filled with runs of random length, of which every
/// other one is freed.
fn half_full() -> Frames {
    let pool = Frames::new(FrameConfig { frames: FRAMES, frames_max: FRAMES, segment_frames: 4096 });
    let mut runs = Vec::new();
    let mut state = 1u64;
    while let Some(run) = pool.allocate_run(1 + (state >> 33) as u32 % 512, FrameId(0)) {
        runs.push(run);
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    runs.into_iter().step_by(2).for_each(|run| pool.free_run(run));
    pool
}

/// Prints the best of 200 short rounds of `operations` calls, in nanoseconds per call: a round
/// short enough to fit between two interruptions gives usable figures also on a busy machine.
fn time(name: &str, operations: u32, mut call: impl FnMut(u32)) {
    let round = |call: &mut dyn FnMut(u32)| {
        let begin = Instant::now();
        (0..operations).for_each(&mut *call);
        begin.elapsed().as_nanos() as f64 / f64::from(operations)
    };
    let best = (0..200).map(|_| round(&mut call)).fold(f64::INFINITY, f64::min);
    println!("{name:<60} {best:8.1} ns");
}

fn main() {
    let pool = half_full();
    println!("{FRAMES} frames, {} free\n", pool.free_frames());
    let word = AtomicU64::new(0);
    time("baseline: an uncontended compare-exchange", 5_000, |_| {
        let old = word.load(Ordering::Relaxed);
        let _ = black_box(word.compare_exchange(old, old ^ 1, Ordering::AcqRel, Ordering::Relaxed));
    });
    let broken = pool.allocate_aligned(Order(6), FrameId(70_000)).expect("half is free");
    pool.free_run(Run { start: FrameId(broken.start.0 + 3), len: 61 });
    for order in [0, 1, 2, 3, 4, 5] {
        time(&format!("aligned run of order {order} in a broken unit"), 5_000, |_| {
            let run = pool.allocate_aligned(Order(order), broken.start).expect("the unit has room");
            pool.free_run(black_box(run));
        });
    }
    pool.free_run(Run { len: 3, ..broken });
    for order in [0, 3, 6, 9] {
        time(&format!("aligned run of order {order}, whole units taken or split, and merged"), 5_000, |_| {
            if let Some(run) = pool.allocate_aligned(Order(order), broken.start) {
                pool.free_run(black_box(run));
            }
        });
    }
    time("a search for a run that does not exist", 500, |_| {
        assert_eq!(black_box(pool.allocate_aligned(Order(16), FrameId(0))), None);
    });
    time("refill of up to 64, and free", 5_000, |_| {
        pool.free_mask(black_box(pool.refill(64, FrameId(70_000)).expect("half is free")));
    });
    let mut held: Vec<Option<Run>> = vec![None; 64];
    let mut state = 1u64;
    for len_max in [32, 512] {
        time(&format!("exact run of 1..{len_max}, 64 held, take and put"), 5_000, |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let near = FrameId((state >> 20) as u32 % FRAMES as u32);
            let slot = &mut held[(state >> 40) as usize % 64];
            if let Some(run) = slot.take() {
                pool.free_run(run);
            }
            *slot = pool.allocate_run(1 + (state >> 47) as u32 % len_max, near);
        });
    }
    let Figures { prompt_run_mean, free_in_units, prompts } = side_by_side(FRAMES, 200_000, 7);
    println!("\n85 % full, concurrently growing sequences, {prompts} prompts:");
    println!(
        "mean run of a prompt {prompt_run_mean:.1}, free space in whole units {:.1} %",
        100.0 * free_in_units
    );
}
