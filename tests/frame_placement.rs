//! Results of placement: prompts of 100 to 1000 blocks and sequences that grow side by side, block
//! by block from a thread's magazine, in a pool that stays 85 % full. Lower bounds for the mean run
//! of a prompt, and for the share of free space in whole units. `examples/frame_speed.rs` prints
//! the figures of the full-size pool.
#![cfg(not(kvpool_loom))]

use kvpool::frame::{FrameConfig, Frames};
use kvpool::{FrameId, Order, Run};

include!("../examples/support/side_by_side.rs");

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
