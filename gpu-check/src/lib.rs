//! Checks and measures kvpool on the GPU that is there: one program, carried to a machine with a device, that says in a few
//! minutes whether every kernel is right, whether the order of events holds under load, and how fast it all is.
//!
//! | section | what |
//! |---|---|
//! | `kernels` | storage on the device against the scalar reference, all layouts; adopted memory; an engine's own pointers |
//! | `protocol` | writes, moves and reads on two streams, with the waits and without |
//! | `bandwidth` | every kernel that moves bytes, beside the best linear copy |
//! | `host` | offloading and bringing back, beside the best copy over the bus |
//! | `interference` | a model's step beside a wave of moves |
//! | `latency` | events, wake-ups, batches that end on a stream |
//! | `resize` | bytes given back to the device, and had again |
//! | `replay` | scheduler threads over a pool on the device, compacted meanwhile, every byte verified |
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

/// What to do.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which device.
    pub ordinal: u16,
    /// Small sizes and few rounds: the checks, and figures that say nothing.
    pub quick: bool,
    /// Only these sections; all of them if there is none.
    pub only: Vec<String>,
}

type Run = fn(&Gpu, &Options, &mut Section) -> Outcome<()>;

/// The sections, in order: what must hold comes first.
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

/// Runs the sections; one that fails does not keep the others from running.
///
/// # Errors
/// The device cannot be used at all: [`CudaError::NoDriver`] where there is none. What its driver says while it is looked at,
/// in words.
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
