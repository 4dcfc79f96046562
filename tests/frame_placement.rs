//! Results of placement: prompts of 100 to 1000 blocks and sequences that grow side by side, block
//! by block from a thread's magazine, in a pool that stays 85 % full. Lower bounds for the mean run
//! of a prompt, and for the share of free space in whole units.
#![cfg(not(kvpool_loom))]

use kvpool::frame::{FrameConfig, Frames};
use kvpool::{FrameId, Order, Run};

/// Results of a churn of concurrently growing sequences.
struct Figures {
    /// Mean length of the runs in which the blocks of prompts were allocated at full load.
    prompt_run_mean: f64,
    /// Mean share of the free frames in whole units.
    free_in_units: f64,
    /// Number of prompts included.
    prompts: usize,
}

/// A sequence: its runs, and the number of blocks by which it will still grow.
struct Sequence {
    runs: Vec<Run>,
    growth: u32,
}

/// Admits sequences to 85 % of `frames` and keeps that load for `steps` steps; in each step, eight
/// sequences grow by a block, in turn. Models the magazines of two threads, each refilled near its
/// last refill.
fn side_by_side(frames: usize, steps: usize, seed: u64) -> Figures {
    let pool = Frames::new(FrameConfig { frames, frames_max: frames, segment_frames: 4096 });
    let mut state = seed;
    let mut roll = |sides: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % sides
    };
    let mut magazines = [Vec::new(), Vec::new()];
    let mut nears = [FrameId(0), FrameId(frames as u32 / 2)];
    let mut live: Vec<Sequence> = Vec::new();
    let (mut owned, mut turn, mut is_full) = (0, 0, false);
    let (mut blocks, mut runs, mut prompts) = (0u64, 0u64, 0);
    let (mut share, mut samples) = (0.0, 0);
    for step in 0..steps {
        while owned < frames * 85 / 100 {
            let count = 100 + roll(900);
            let near = nears[prompts % 2];
            let mut got: Vec<Run> = Vec::new();
            assert_eq!(pool.allocate_many(count, near, &mut |run| got.push(run)), count);
            owned += count as usize;
            if is_full {
                blocks += u64::from(count);
                // Adjacent runs are one.
                runs += 1 + got.windows(2).filter(|pair| pair[0].end() != pair[1].start.0).count() as u64;
            }
            prompts += 1;
            live.push(Sequence { runs: got, growth: 20 + roll(200) });
        }
        is_full |= step > steps / 4;
        for _ in 0..8 {
            turn = (turn + 1) % live.len();
            if live[turn].growth == 0 {
                for run in live.swap_remove(turn).runs {
                    owned -= run.len as usize;
                    pool.free_run(run);
                }
                continue;
            }
            let thread = turn % 2;
            if magazines[thread].is_empty() {
                let mask = pool.refill(64, nears[thread]).expect("the pool is not full");
                nears[thread] = mask.base;
                magazines[thread].extend(mask.frames());
                magazines[thread].reverse();
            }
            let frame = magazines[thread].pop().expect("it was refilled");
            live[turn].runs.push(Run { start: frame, len: 1 });
            live[turn].growth -= 1;
            owned += 1;
        }
        if is_full && step % 64 == 0 {
            let census = pool.census(Order(6));
            share += census.free_in_units as f64 / census.free as f64;
            samples += 1;
        }
    }
    Figures {
        prompt_run_mean: blocks as f64 / runs as f64,
        free_in_units: share / f64::from(samples),
        prompts,
    }
}

#[test]
fn prompts_stay_in_long_runs_and_free_space_in_whole_units() {
    let figures = side_by_side(32_768, 40_000, 7);
    let Figures { prompt_run_mean, free_in_units, prompts } = figures;
    println!(
        "{prompts} prompts: mean run {prompt_run_mean:.1}, {free_in_units:.2} of the free space in whole units"
    );
    assert!(prompt_run_mean > 70.0, "mean run {prompt_run_mean}");
    assert!(free_in_units > 0.5, "{free_in_units} of the free space in whole units");
}
