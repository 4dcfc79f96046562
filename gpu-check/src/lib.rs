//! Checks and measures kvpool on the local GPU: one program for a machine with a device that
//! reports within minutes whether every kernel is correct, whether the ordering of events holds
//! under load, and how fast the operations are.
//!
//! | section | contents |
//! |---|---|
//! | `kernels` | device storage against the scalar reference, all layouts; adopted memory; an engine's pointers |
//! | `load` | kernels loaded as PTX and as machine code, without the driver's cache |
//! | `protocol` | writes, moves and reads on two streams, with waits and without |
//! | `bandwidth` | every kernel that moves bytes, relative to the best linear copy; conversions compared with the host's to the bit, and with the kernels for one pair of types |
//! | `shapes` | the copy kernels by CTAs, threads and bytes in flight, and the driver's copies of the same pieces |
//! | `compaction` | a pool is defragmented, alone and beside a batch; every byte verified |
//! | `host` | offloading and bringing back by every way, relative to the best copy over the bus and to `memcpy` |
//! | `decode` | the stores of one decode step, on a stream and from a graph |
//! | `graph` | a graph replayed while a pool is defragmented; every byte verified |
//! | `interference` | a model's step beside a wave of moves, also one that occupies every multiprocessor |
//! | `latency` | events, wake-ups, ends of batches on a stream |
//! | `mapping` | memory mapped and unmapped, and copies spread over most of it |
//! | `resize` | memory returned to the device, and taken again, beside an engine's steps |
//! | `tables` | an engine's kernel that reads block tables under compaction, preemption and resizes |
//! | `replay` | scheduler threads over a pool on the device, under compaction, every byte verified |
//!
//! Each section runs in a process of its own ([`supervise`]).
#![cfg(feature = "cuda")]

use std::time::{Duration, Instant};

use kvpool_cuda::launch::Work;
use kvpool_cuda::{CudaError, Device, DeviceInfo};

mod bandwidth;
pub mod clocks;
mod compaction;
mod decode;
pub mod gpu;
mod graph;
mod host;
mod interference;
mod kernels;
mod latency;
pub mod load;
mod mapping;
mod protocol;
mod replay;
pub mod report;
mod resize;
mod sample;
mod shapes;
pub mod supervise;
mod tables;

use gpu::{Gpu, Outcome};
use report::{Section, SectionReport};

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ordinal of the device.
    pub ordinal: u16,
    /// Small sizes and few rounds: runs the checks, but the figures are meaningless.
    pub quick: bool,
    /// Print each result at once, for the process that started this one.
    pub tells: bool,
}

type Run = fn(&Gpu, &Options, &mut Section) -> Outcome<()>;

/// A section of the checks.
#[derive(Clone, Copy)]
pub struct Part {
    /// Name of the section.
    pub name: &'static str,
    /// Time limit in seconds.
    pub limit_s: u64,
    run: Run,
    /// What it launches itself, as pools do. Other sections use pools.
    pub works: &'static [Work],
}

impl Part {
    /// Returns a variable for the environment of the section's process.
    #[must_use]
    pub fn env(&self) -> Option<(&'static str, &'static str)> {
        (self.name == "load").then_some(load::ENV)
    }

    const fn new(name: &'static str, limit_s: u64, run: Run) -> Self {
        Self { name, limit_s, run, works: &[] }
    }

    const fn with(self, works: &'static [Work]) -> Self {
        Self { works, ..self }
    }

    /// Returns the time after which the section is killed.
    #[must_use]
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_s)
    }
}

/// The sections in order; checks of correctness come first.
pub const SECTIONS: [Part; 15] = [
    Part::new("kernels", 40, kernels::run).with(kernels::WORKS),
    Part::new("load", 10, load::run),
    Part::new("protocol", 20, protocol::run).with(protocol::WORKS),
    Part::new("bandwidth", 35, bandwidth::run).with(bandwidth::WORKS),
    Part::new("shapes", 15, shapes::run).with(shapes::WORKS),
    Part::new("compaction", 20, compaction::run),
    Part::new("host", 20, host::run).with(host::WORKS),
    Part::new("decode", 15, decode::run),
    Part::new("graph", 20, graph::run),
    Part::new("interference", 20, interference::run).with(interference::WORKS),
    Part::new("latency", 10, latency::run),
    Part::new("mapping", 15, mapping::run).with(mapping::WORKS),
    Part::new("resize", 15, resize::run),
    Part::new("tables", 10, tables::run),
    Part::new("replay", 15, replay::run),
];

/// Sum of the time limits, in seconds.
pub const LIMITS_S: u64 = {
    let (mut sum, mut at) = (0, 0);
    while at < SECTIONS.len() {
        sum += SECTIONS[at].limit_s;
        at += 1;
    }
    assert!(sum <= 280, "with the time to start the driver, all sections end within five minutes");
    sum
};

/// Opens a device to keep it started while the sections run: without a process that has it open, a
/// driver that is not persistent starts the device again for each section, which takes seconds of
/// its limit. `None` if only one process may use the device, which must be the section's.
///
/// # Errors
/// If the device cannot be used.
pub fn held(ordinal: u16) -> Result<Option<Device>, CudaError> {
    let is_exclusive = |info: &DeviceInfo| info.ordinal == ordinal && info.is_exclusive;
    if kvpool_cuda::devices()?.iter().any(is_exclusive) {
        return Ok(None);
    }
    Device::open(ordinal.into()).map(Some)
}

/// Runs one section in this process.
///
/// # Errors
/// If the device cannot be used at all: [`CudaError::NoDriver`] if there is no driver. Errors of the
/// driver while the device is examined are part of the report.
pub fn run(part: &Part, options: &Options) -> Result<SectionReport, CudaError> {
    let mut section = Section { tells: options.tells, ..Section::new(part.name) };
    let begin = Instant::now();
    let gpu = match Gpu::open(options.ordinal)? {
        Ok(gpu) => gpu,
        Err(error) => {
            section.error = Some(error.to_string());
            return Ok(SectionReport { device: None, section });
        }
    };
    let device = match gpu.facts() {
        Ok(device) => Some(device),
        Err(error) => {
            section.error = Some(error.to_string());
            None
        }
    };
    let sampler = gpu.pci().ok().and_then(|pci| clocks::Sampler::start(&pci));
    if section.error.is_none()
        && let Err(error) = (part.run)(&gpu, options, &mut section)
    {
        section.error = Some(error.to_string());
    }
    section.clocks = sampler.and_then(clocks::Sampler::stop);
    section.seconds = begin.elapsed().as_secs_f64();
    Ok(SectionReport { device, section })
}
