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
//! | `crossing` | frames sent to another device, and received at the same time, relative to one copy between the devices |
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

use kvpool_cuda::launch::{Choices, MOVING_CTAS, Work};
use kvpool_cuda::{CudaError, Device, DeviceInfo};

mod bandwidth;
pub mod clocks;
mod compaction;
mod crossing;
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
pub mod start;
pub mod supervise;
mod tables;
pub mod variants;

use gpu::{Gpu, Outcome};
use report::{Section, SectionReport};
use start::Start;
use variants::Variant;

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Ordinal of the device.
    pub ordinal: u16,
    /// Small sizes and few rounds: runs the checks, but the figures are meaningless.
    pub quick: bool,
    /// Other choices than the default.
    pub variant: Option<&'static Variant>,
    /// Print each result at once, for the process that started this one.
    pub tells: bool,
}

type Run = fn(&Gpu, &Options, &mut Section) -> Outcome<()>;

/// A section of the checks.
#[derive(Clone, Copy)]
pub struct Part {
    /// Name of the section.
    pub name: &'static str,
    /// Time after which the section is killed on a fast machine; see [`Start::limit`].
    pub limit: Duration,
    run: Run,
    /// Work of pools that it launches, itself or by a pool.
    pub works: &'static [Work],
}

impl Part {
    /// Returns the variables for the environment of the section's process.
    pub fn env(&self, variant: Option<&Variant>) -> impl Iterator<Item = (&'static str, &'static str)> {
        (self.name == "load").then_some(load::ENV).into_iter().chain(variant.and_then(|variant| variant.env))
    }

    /// Returns the name of its report.
    #[must_use]
    pub fn title(&self, variant: Option<&Variant>) -> String {
        variant.map_or_else(|| self.name.into(), |variant| format!("{}, {}", self.name, variant.name))
    }

    const fn new(name: &'static str, limit_s: u64, run: Run, works: &'static [Work]) -> Self {
        Self { name, limit: Duration::from_secs(limit_s), run, works }
    }
}

/// Waves of a compaction.
const WAVES: &[Work] = &[Work::Wave, Work::WaveBeside { ctas: MOVING_CTAS }];

/// Waves of a compaction, of blocks that the host writes and reads.
const BLOCKS: &[Work] = &[WAVES[0], WAVES[1], Work::Pack, Work::Unpack];

/// Waves of a compaction beside an engine that stores rows.
const ENGINE: &[Work] = &[WAVES[0], WAVES[1], Work::Rows];

/// Rows loaded beside such waves.
const GRAPH: &[Work] = &[WAVES[0], WAVES[1], Work::Pack, Work::Unpack, Work::Rows];

/// Rows stored, in frames that the host reads and wipes.
const STEP: &[Work] = &[Work::Rows, Work::Pack, Work::Zero];

/// The sections in order; checks of correctness come first.
pub const SECTIONS: [Part; 16] = [
    Part::new("kernels", 40, kernels::run, kernels::WORKS),
    Part::new("load", 10, load::run, &[]),
    Part::new("protocol", 20, protocol::run, protocol::WORKS),
    Part::new("bandwidth", 35, bandwidth::run, bandwidth::WORKS),
    Part::new("shapes", 15, shapes::run, shapes::WORKS),
    Part::new("compaction", 20, compaction::run, BLOCKS),
    Part::new("host", 20, host::run, host::WORKS),
    Part::new("crossing", 15, crossing::run, crossing::WORKS),
    Part::new("decode", 15, decode::run, STEP),
    Part::new("graph", 20, graph::run, GRAPH),
    Part::new("interference", 20, interference::run, interference::WORKS),
    Part::new("latency", 10, latency::run, WAVES),
    Part::new("mapping", 15, mapping::run, mapping::WORKS),
    Part::new("resize", 15, resize::run, BLOCKS),
    Part::new("tables", 10, tables::run, ENGINE),
    Part::new("replay", 15, replay::run, ENGINE),
];

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
/// If the device cannot be used at all: [`CudaError::NoDriver`] if there is no driver. Errors of
/// the driver while the device is examined are part of the report.
pub fn run(part: &Part, options: &Options) -> Result<SectionReport, CudaError> {
    let mut section = Section { tells: options.tells, ..Section::new(&part.title(options.variant)) };
    let (begin, mut device) = (Instant::now(), None);
    let choices = options.variant.map_or(Choices::DEFAULT, |variant| variant.choices);
    let opened = Device::open_with(options.ordinal.into(), choices)?;
    let ran = Gpu::over(opened, begin.elapsed()).and_then(|gpu| {
        section.start = Some(Start::measure(&gpu)?);
        section.tell();
        device = Some(gpu.facts()?);
        let sampler = clocks::Sampler::start(&gpu.pci()?);
        let ran = (part.run)(&gpu, options, &mut section);
        section.clocks = sampler.and_then(clocks::Sampler::stop);
        ran
    });
    section.error = ran.err().map(|error| error.to_string());
    section.seconds = begin.elapsed().as_secs_f64();
    Ok(SectionReport { device, section })
}
