//! Defragments a pool of blocks of 896 KiB on the device: alone, and beside a batch whose kernel
//! runs for 20 ms and whose end is awaited. Every byte of every block is verified.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragOptions, DefragReport};
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Order, Pool, Run};
use kvpool_cuda::CudaStorage;

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
/// Timeout, longer than the batch takes.
const PATIENCE: Duration = Duration::from_secs(10);
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

/// Blocks scattered over a pool, every third one, with their own bytes.
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
        let took = took.as_secs_f64() * 1e3;
        let what = format!("{moved} blocks of {kib} KiB defragmented, round {round}");
        section.ratio(what, took, "ms", took / linear, LINEAR);
        scattered.verify(section, "alone")?;
    }

    let burn = gpu.probe("kvp_probe_burn")?;
    let result = gpu.buffer(16)?;
    let params = |rounds| ProbeParams { from: 0, to: result.address(), vectors: 0, rounds, reserved: 0 };
    // The kernel leaves a few multiprocessors' room, as a model's kernels do.
    let grid = 4 * gpu.multiprocessors;
    let rounds = 10_000;
    let once = gpu.time(&stream, 3, || {
        // SAFETY: writes at most the result.
        unsafe { launch(&stream, &burn, grid, &params(rounds)) }
    })?;
    let rounds = ((kernel_ms / once.max(1e-3) * f64::from(rounds)) as u32).max(100);
    let alone = gpu.time(&stream, 3, || {
        // SAFETY: as above.
        unsafe { launch(&stream, &burn, grid, &params(rounds)) }
    })?;
    section.figure(ALONE, alone, "ms");
    let scattered = Scattered::new(gpu, &sizes)?;
    let batch = scattered.pool.begin_batch_on(&shared)?;
    let begin = Instant::now();
    // SAFETY: as above.
    unsafe { launch(&stream, &burn, grid, &params(rounds))? };
    let finish = batch.finish_on(&shared)?;
    let (report, took) = scattered.defragment(&runtime, &sizes)?;
    let was_pending = begin.elapsed().as_secs_f64() * 1e3 < alone;
    runtime.block_on(async { tokio::time::timeout(PATIENCE, finish).await })??;
    let ended = begin.elapsed().as_secs_f64() * 1e3;
    let moved = report.moved_blocks;
    let what = format!("{moved} blocks of {kib} KiB defragmented beside a kernel of {alone:.1} ms");
    section.ratio(what, took.as_secs_f64() * 1e3, "ms", took.as_secs_f64() * 1e3 / linear, LINEAR);
    section.ratio("the batch's end, after its kernel's launch", ended, "ms", ended / alone, ALONE);
    section.check(
        "blocks moved beside the batch",
        moved > 0,
        format!(
            "{moved} blocks; the batch was {}",
            if was_pending { "pending at the end" } else { "over before" }
        ),
    );
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
    /// Fills a pool, and frees two of three blocks.
    ///
    /// # Errors
    /// An error of the device or of the pool.
    pub fn new(gpu: &Gpu, sizes: &Sizes) -> Outcome<Self> {
        let Sizes { layout, blocks, .. } = sizes;
        let storage = CudaStorage::new(&gpu.device, layout.clone(), blocks + 1, blocks + 1)?;
        let pool = Pool::builder(layout.clone()).blocks(*blocks).storage(Arc::new(storage)).build()?;
        let mut all = Vec::with_capacity(*blocks);
        for _ in 0..*blocks {
            all.push(pool.allocate_owned(AllocRequest::new(1))?);
        }
        let mut kept = Vec::new();
        for (at, lease) in all.into_iter().enumerate() {
            if at % 3 == 0 {
                kept.push(lease);
            }
        }
        for lease in &mut kept {
            let runs: Vec<Run> = lease.runs().collect();
            let bytes = pattern(layout.packed_bytes(), lease.blocks()[0].0);
            // SAFETY: the lease's own block, which no one else uses.
            unsafe { pool.storage().ok_or("a pool with storage")?.unpack(&runs, &bytes)? };
            lease.seal(..);
        }
        Ok(Self { pool, kept })
    }

    fn defragment(
        &self,
        runtime: &tokio::runtime::Runtime,
        sizes: &Sizes,
    ) -> Outcome<(DefragReport, Duration)> {
        let options = sizes.options();
        let begin = Instant::now();
        let report = runtime.block_on(self.pool.defragment_with(options))?;
        Ok((report, begin.elapsed()))
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
            wrong += usize::from(got != pattern(got.len(), lease.blocks()[0].0));
        }
        let count = self.kept.len();
        section.check(
            format!("bytes of all blocks, {when}"),
            wrong == 0,
            format!("{wrong} of {count} differ"),
        );
        self.pool.audit()?;
        Ok(())
    }
}

/// Returns a block's bytes, which differ between blocks and between places in a block.
#[must_use]
pub fn pattern(bytes: usize, block: u32) -> Vec<u8> {
    let mut out = vec![0; bytes];
    for (at, word) in out.chunks_mut(8).enumerate() {
        let value = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ u64::from(block) << 9).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
    out
}

/// Returns the time of a linear copy of this many bytes in milliseconds.
fn linear_copy(gpu: &Gpu, bytes: usize) -> Outcome<f64> {
    let (stream, _) = gpu.stream()?;
    let (source, target) = (gpu.buffer(bytes)?, gpu.buffer(bytes)?);
    let probe = gpu.probe("kvp_probe_copy")?;
    let (from, to, vectors) = (source.address(), target.address(), bytes as u64 / 16);
    let params = ProbeParams { from, to, vectors, rounds: 1, reserved: 0 };
    gpu.time(&stream, 5, || {
        // SAFETY: the two buffers.
        unsafe { launch(&stream, &probe, 8 * gpu.multiprocessors, &params) }
    })
}
