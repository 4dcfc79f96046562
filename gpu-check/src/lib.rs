//! Checks and measures kvpool on the local GPU: one program for a machine with a device that
//! reports within minutes whether every kernel is correct, whether the ordering of events holds
//! under load, and how fast the operations are.
//!
//! | section | contents |
//! |---|---|
//! | `kernels` | device storage against the scalar reference, all layouts; adopted memory; an engine's pointers |
//! | `protocol` | writes, moves and reads on two streams, with waits and without |
//! | `bandwidth` | every kernel that moves bytes, relative to the best linear copy |
//! | `host` | offloading and bringing back, relative to the best copy over the bus |
//! | `interference` | a model's step beside a wave of moves |
//! | `latency` | events, wake-ups, ends of batches on a stream |
//! | `resize` | memory returned to the device, and taken again |
//! | `replay` | scheduler threads over a pool on the device, under compaction, every byte verified |
#![cfg(feature = "cuda")]

use std::time::Instant;

use kvpool::cuda::CudaError;

mod bandwidth;
pub mod gpu;
mod host;
mod interference;
mod kernels;
mod latency;
mod protocol;
mod replay;
pub mod report;
mod resize;

use gpu::{Gpu, Outcome};
use report::{Report, Section};

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ordinal of the device.
    pub ordinal: u16,
    /// Small sizes and few rounds: runs the checks, but the figures are meaningless.
    pub quick: bool,
    /// Names of the sections to run; all sections if empty.
    pub only: Vec<String>,
}

type Run = fn(&Gpu, &Options, &mut Section) -> Outcome<()>;

/// The sections in order; checks of correctness come first.
pub const SECTIONS: [(&str, Run); 8] = [
    ("kernels", kernels::run),
    ("protocol", protocol::run),
    ("bandwidth", bandwidth::run),
    ("host", host::run),
    ("interference", interference::run),
    ("latency", latency::run),
    ("resize", resize::run),
    ("replay", replay::run),
];

/// Runs the sections. A section that fails does not prevent the others from running.
///
/// # Errors
/// If the device cannot be used at all: [`CudaError::NoDriver`] if there is no driver. The inner
/// result has errors of the driver while the device is examined, as text.
pub fn run(options: &Options) -> Result<Outcome<Report>, CudaError> {
    let begin = Instant::now();
    let gpu = match Gpu::open(options.ordinal)? {
        Ok(gpu) => gpu,
        Err(error) => return Ok(Err(error)),
    };
    let device = match gpu.facts() {
        Ok(device) => device,
        Err(error) => return Ok(Err(error)),
    };
    let mut sections = Vec::new();
    for (name, run) in SECTIONS {
        if !options.only.is_empty() && !options.only.iter().any(|only| only == name) {
            continue;
        }
        let (mut section, begin) = (Section::new(name), Instant::now());
        if let Err(error) = run(&gpu, options, &mut section) {
            section.error = Some(error.to_string());
        }
        section.seconds = begin.elapsed().as_secs_f64();
        sections.push(section);
    }
    let passed = sections.iter().all(Section::passed);
    Ok(Ok(Report { device, passed, seconds: begin.elapsed().as_secs_f64(), sections }))
}
