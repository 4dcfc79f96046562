//! Defragments a pool of blocks of 896 KiB on the device: alone, and beside a batch whose kernel
//! runs for 20 ms and whose end is awaited. Every byte of every block is verified.

use std::sync::Arc;
use std::time::Instant;

use kvpool::compact::{DefragOptions, DefragReport};
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Order, Pool, Run};
use kvpool_cuda::CudaStorage;
use kvpool_testkit::leases;
use kvpool_testkit::rng::Rng;
use tokio::runtime::Runtime;

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, ProbeParams, launch};
use crate::report::Section;

/// Baseline: a linear copy of as many bytes by one kernel.
const LINEAR: &str = "one linear copy of these bytes";
/// Compactions beside nothing; the first one also loads the kernel.
const ROUNDS: usize = 3;
/// Baseline: the batch's kernel without a compaction beside it.
const ALONE: &str = "the kernel alone";
/// Length of the batch's kernel.
const KERNEL_MS: f64 = 20.0;
/// Maximum number of waves for 1,000 blocks.
const WAVES_MAX: usize = 16;

/// Sizes of a run.
pub struct Sizes {
    /// Layout of the blocks.
    pub layout: KvLayout,
    blocks: usize,
    moved: usize,
    order: Order,
}

/// Blocks scattered over a pool, with their own bytes.
pub struct Scattered {
    /// The pool.
    pub pool: Pool,
    /// The blocks, each sealed.
    pub kept: Vec<Lease<'static>>,
}

/// Measures both cases.
///
/// # Errors
/// An error of the device or of the pool.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let sizes = Sizes::new(options)?;
    let kernel_ms = if options.quick { 0.0 } else { KERNEL_MS };
    let runtime = gpu::runtime()?;
    let block = sizes.layout.packed_bytes();
    let kib = block / 1024;
    let (stream, shared) = gpu.stream()?;

    let mut linear = 0.0;
    for round in 1..=ROUNDS {
        let scattered = Scattered::new(gpu, &sizes)?;
        let (report, took) = scattered.defragment(&runtime, &sizes)?;
        let moved = report.moved_blocks;
        section.check("blocks moved, alone", moved > 0, format!("{moved} blocks in {} waves", report.waves));
        let waves = report.waves * 1000 / moved.max(1);
        section.check("waves for 1,000 blocks", options.quick || waves <= WAVES_MAX, format!("{waves}"));
        if round == 1 {
            linear = linear_copy(gpu, moved * block)?;
            section.figure(LINEAR, linear, "ms");
        }
        let what = format!("{moved} blocks of {kib} KiB defragmented, round {round}");
        section.ratio(what, took, "ms", took / linear, LINEAR);
        scattered.verify(section, "alone")?;
    }

    let burn = gpu.probe("kvp_probe_burn")?;
    let result = gpu.buffer(16)?;
    let params = |rounds| ProbeParams::burn(result.address(), rounds);
    // The kernel leaves a few multiprocessors' room, as a model's kernels do.
    let grid = 4 * gpu.multiprocessors;
    let rounds = 10_000;
    // SAFETY: writes at most the result.
    let burn = |rounds| unsafe { launch(&stream, &burn, grid, &params(rounds)) };
    let once = gpu.time(&stream, 3, || burn(rounds))?;
    let rounds = ((kernel_ms / once.max(1e-3) * f64::from(rounds)) as u32).max(100);
    let alone = gpu.time(&stream, 3, || burn(rounds))?;
    section.figure(ALONE, alone, "ms");
    let scattered = Scattered::new(gpu, &sizes)?;
    let batch = scattered.pool.begin_batch_on(&shared)?;
    let begin = Instant::now();
    burn(rounds)?;
    let finish = batch.finish_on(&shared)?;
    let (report, took) = scattered.defragment(&runtime, &sizes)?;
    let was = if begin.elapsed().as_secs_f64() * 1e3 < alone { "pending at the end" } else { "over before" };
    gpu::wait(&runtime, finish)?;
    let ended = begin.elapsed().as_secs_f64() * 1e3;
    let moved = report.moved_blocks;
    let what = format!("{moved} blocks of {kib} KiB defragmented beside a kernel of {alone:.1} ms");
    section.ratio(what, took, "ms", took / linear, LINEAR);
    section.ratio("the batch's end, after its kernel's launch", ended, "ms", ended / alone, ALONE);
    section.check("blocks moved beside the batch", moved > 0, format!("{moved} blocks; the batch was {was}"));
    scattered.verify(section, "beside a batch")
}

impl Sizes {
    /// Returns the sizes of a run.
    ///
    /// # Errors
    /// If the layout is not known.
    pub fn new(options: &Options) -> Outcome<Self> {
        Ok(if options.quick {
            Self { layout: KvLayout::named("tiny")?, blocks: 96, moved: 20, order: Order(3) }
        } else {
            Self { layout: KvLayout::named("qwen2.5-7b")?, blocks: 4096, moved: 1000, order: Order(8) }
        })
    }

    /// Returns the options of the compaction.
    #[must_use]
    pub fn options(&self) -> DefragOptions {
        let budget = (self.moved * self.layout.bytes_per_block()) as u64;
        DefragOptions::new().order(self.order).fragmentation_penalty(0).budget_bytes(budget)
    }
}

impl Scattered {
    /// Fills a new pool, and frees two of three blocks.
    ///
    /// # Errors
    /// An error of the device or of the pool.
    pub fn new(gpu: &Gpu, sizes: &Sizes) -> Outcome<Self> {
        let Sizes { layout, blocks, .. } = sizes;
        let storage = CudaStorage::new(&gpu.device, layout.clone(), blocks + 1, blocks + 1)?;
        Self::of(Pool::builder(layout.clone()).blocks(*blocks).storage(Arc::new(storage)).build()?, 3)
    }

    /// Fills a pool, and keeps each block of this many.
    ///
    /// # Errors
    /// An error of the device or of the pool.
    pub fn of(pool: Pool, step: usize) -> Outcome<Self> {
        let all = leases::singles(&pool, AllocRequest::new(pool.total_blocks()));
        let mut kept: Vec<Lease<'static>> = all.into_iter().step_by(step).collect();
        for lease in &mut kept {
            let runs: Vec<Run> = lease.runs().collect();
            let bytes = content(lease, pool.layout().packed_bytes());
            // SAFETY: the lease's own block, which no one else uses.
            unsafe { pool.storage().ok_or("a pool with storage")?.unpack(&runs, &bytes)? };
            lease.seal(..);
        }
        Ok(Self { pool, kept })
    }

    /// Returns the report, and the time in milliseconds.
    fn defragment(&self, runtime: &Runtime, sizes: &Sizes) -> Outcome<(DefragReport, f64)> {
        let begin = Instant::now();
        let report = runtime.block_on(self.pool.defragment_with(sizes.options()))?;
        Ok((report, begin.elapsed().as_secs_f64() * 1e3))
    }

    /// Checks that each block has its bytes.
    ///
    /// # Errors
    /// An error of the device, or an audit that fails.
    pub fn verify(&self, section: &mut Section, when: &str) -> Outcome<()> {
        let storage = self.pool.storage().ok_or("a pool with storage")?;
        let mut got = vec![0; storage.layout().packed_bytes()];
        let mut wrong = 0;
        for lease in &self.kept {
            let runs: Vec<Run> = lease.runs().collect();
            // SAFETY: as in `new`; no compaction runs.
            unsafe { storage.pack(&runs, &mut got)? };
            wrong += usize::from(got != content(lease, got.len()));
        }
        let count = self.kept.len();
        section.none(format!("bytes of all blocks, {when}"), wrong, format_args!("of {count} differ"));
        self.pool.audit()?;
        Ok(())
    }
}

/// Returns the bytes that are written to the only block of a lease.
#[must_use]
pub fn content(lease: &Lease<'_>, bytes: usize) -> Vec<u8> {
    Rng(leases::block(lease).0.into()).bytes(bytes)
}

/// Returns the time of a linear copy of this many bytes in milliseconds.
fn linear_copy(gpu: &Gpu, bytes: usize) -> Outcome<f64> {
    let (stream, _) = gpu.stream()?;
    let (source, target) = (gpu.buffer(bytes)?, gpu.buffer(bytes)?);
    let params = ProbeParams::copy(source.address(), target.address(), bytes);
    // SAFETY: the two buffers.
    unsafe { gpu.time_copy(&stream, 5, 8, &params) }
}
