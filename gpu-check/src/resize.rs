//! Checks that a pool returns memory to the device when it shrinks, takes it again when it grows,
//! and keeps the bytes of used blocks; and measures the steps of an engine meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use kvpool::storage::{DeviceStream, Dtype, KvLayout};
use kvpool::{Pool, ResizeOptions};
use kvpool_cuda::{CudaConfig, CudaStorage};

use crate::Options;
use crate::compaction::Scattered;
use crate::gpu::{self, Buffer, Gpu, Outcome, ProbeParams, launch};
use crate::report::Section;

/// Baseline: the time to map the whole pool at first.
const MAPPED: &str = "memory mapped";
/// Baseline: a step without a resize beside it.
const STEP: &str = "a step alone";
/// Steps for which a resize waits without progress, at least.
const PATIENCE_STEPS: u32 = 50;
/// Bytes that the driver may take for itself meanwhile.
const DRIVERS_OWN: u32 = 8 << 20;

/// Shrinks to an eighth and grows again.
///
/// # Errors
/// An error of the device or of the pool.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    // Memory is mapped in steps of at least 32 MiB of each plane, or a 64th of it. A pool of fewer
    // steps would return little.
    let (layout, config, blocks) = if options.quick {
        // Of one layer, whose planes have many times the device's granule of 2 MiB.
        let wide = KvLayout::builder().layers(1).kv_heads(2).head_dim(64).dtype(Dtype::Bf16).build()?;
        (wide, CudaConfig::default().segment_frames(256), 8192)
    } else {
        (KvLayout::named("qwen2.5-7b")?, CudaConfig::default(), 8192)
    };
    let free = || gpu.context.mem_get_info().map(|(free, _)| free as f64);
    let before = free()?;
    let begin = Instant::now();
    let storage = CudaStorage::with_config(&gpu.device, layout.clone(), blocks + 1, blocks + 1, config)?;
    let mapped = begin.elapsed().as_secs_f64() * 1e3;
    section.figure(MAPPED, mapped, "ms");
    let pool = Pool::builder(layout).blocks(blocks).storage(Arc::new(storage)).build()?;
    let built = free()?;
    section.figure("memory taken", (before - built) / f64::from(1 << 20), "MiB");

    // Half of what is left after the shrink, from the first frame to the last.
    let scattered = Scattered::of(pool, 16)?;
    let pool = &scattered.pool;
    let runtime = gpu::runtime()?;
    let steps = Steps::new(gpu, options)?;
    let pause = || {
        std::thread::sleep(steps.pause);
        Ok(())
    };
    let ((), alone) = steps.during(pool, pause)?;
    // A shrink waits for batches: how long one takes is measured, since a mock device is slow.
    let longest = alone.iter().max().copied().unwrap_or_default();
    let options = ResizeOptions::default();
    let patience = options.patience.max(PATIENCE_STEPS * longest);
    let options = options.patience(patience);
    let alone = Some((section.latency(STEP, alone, None), "a step alone, p50"));
    let resize = |total| {
        let begin = Instant::now();
        let (report, beside) =
            steps.during(pool, || Ok(runtime.block_on(pool.resize_with(total, options))?))?;
        Outcome::Ok((report, beside, begin.elapsed().as_secs_f64() * 1e3))
    };
    let (report, beside, took) = resize(blocks / 8)?;
    section.ratio("shrunk to an eighth", took, "ms", took / mapped, MAPPED);
    section.latency("a step while the pool shrinks", beside, alone);
    section.figure("blocks moved out of the way", report.moved.moved_blocks as f64, "blocks");
    let small = free()?;
    let (returned, taken) = (small - built, before - built);
    section.ratio("memory returned", returned / f64::from(1 << 20), "MiB", returned / taken, "memory taken");
    let share = format!("{:.1} %", 100.0 * returned / taken);
    section.check("most of the memory was returned", returned > 0.6 * taken, share);
    scattered.verify(section, "after the shrink")?;
    let (_, beside, took) = resize(blocks)?;
    section.ratio("grown again", took, "ms", took / mapped, MAPPED);
    section.latency("a step while the pool grows", beside, alone);
    scattered.verify(section, "after growing")?;
    drop((scattered, steps));
    let after = free()?;
    // The driver keeps a few MiB of its own, which it takes when it needs them.
    let is_returned = (before - after).abs() <= (0.01 * taken).max(f64::from(DRIVERS_OWN));
    let missing = format!("{:.1} MiB are missing", (before - after) / f64::from(1 << 20));
    section.check("all memory is returned at the end", is_returned, missing);
    Ok(())
}

/// Steps of an engine: a batch around a short kernel, again and again.
struct Steps<'a> {
    gpu: &'a Gpu,
    stream: Arc<CudaStream>,
    shared: DeviceStream,
    result: Buffer,
    rounds: u32,
    /// Time for steps without a resize.
    pause: Duration,
}

impl<'a> Steps<'a> {
    /// Chooses a kernel of about a millisecond.
    fn new(gpu: &'a Gpu, options: &Options) -> Outcome<Self> {
        let (stream, shared) = gpu.stream()?;
        let pause = Duration::from_millis(if options.quick { 20 } else { 200 });
        let mut steps = Self { gpu, stream, shared, result: gpu.buffer(16)?, rounds: 1000, pause };
        let once = gpu.time(&steps.stream, 3, || steps.launch())?;
        let longest = if options.quick { 1e4 } else { 1e7 };
        steps.rounds = (1000.0 / once.max(1e-3)).clamp(1.0, longest) as u32;
        Ok(steps)
    }

    fn launch(&self) -> Outcome<()> {
        let params = ProbeParams::burn(self.result.address(), self.rounds);
        // SAFETY: writes at most the result, which is kept until the stream has been waited for.
        unsafe { launch(&self.stream, &self.gpu.probe("kvp_probe_burn")?, self.gpu.multiprocessors, &params) }
    }

    /// Takes steps while `work` runs, at least one. Returns its result and the times of the steps, from
    /// the beginning of a batch to the notification of its end.
    fn during<T>(&self, pool: &Pool, work: impl FnOnce() -> Outcome<T>) -> Outcome<(T, Vec<Duration>)> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stepping = scope.spawn(|| {
                let step = || -> Outcome<Vec<Duration>> {
                    self.gpu.context.bind_to_thread()?;
                    let runtime = gpu::runtime()?;
                    let mut times = Vec::new();
                    while times.is_empty() || !is_over.load(Ordering::Relaxed) {
                        let begin = Instant::now();
                        let batch = pool.begin_batch_on(&self.shared)?;
                        self.launch()?;
                        let ended = batch.finish_on(&self.shared)?;
                        gpu::wait(&runtime, ended)?;
                        times.push(begin.elapsed());
                    }
                    Ok(times)
                };
                step().map_err(|error| error.to_string())
            });
            let done = work();
            is_over.store(true, Ordering::Relaxed);
            let times = stepping.join().map_err(|_| "a step panicked")??;
            Ok((done?, times))
        })
    }
}
