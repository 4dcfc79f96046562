//! Shared code of the benches: the subjects under comparison, their workloads, and the checks of
//! their results.
//!
//! Every figure is a ratio against a baseline of the same run, because machines drift. A subject
//! first runs [`check`], which owns blocks from several threads at once and looks for a block with
//! two owners; only then is it timed, and afterwards its free blocks are counted.

pub mod bytes;
pub mod check;
pub mod measure;
pub mod quiet;
pub mod report;
pub mod reuse;
pub mod step;
pub mod subject;
pub mod threads;
pub mod undisturbed;

pub use criterion;
pub use subject::{Subject, Worker};

use std::time::Duration;

/// Default number of blocks of a pool under measurement: the KV cache of one large GPU.
pub const BLOCKS: usize = 65_536;

/// Settings for short measurements: all benches together take minutes.
pub fn settings() -> criterion::Criterion {
    criterion::Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700))
        .sample_size(20)
        .without_plots()
        .configure_from_args()
}
