//! Checks that a pool returns memory to the device when it shrinks, takes it again when it grows,
//! and keeps the bytes of used blocks; and measures the steps of an engine meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use half::bf16;
use kvpool::storage::{DeviceStream, Dtype, Elements, ElementsMut, KvLayout};
use kvpool::{AllocRequest, Pool, Sequence, SequenceId};
use kvpool_cuda::{CudaConfig, CudaStorage};

use crate::Options;
use crate::gpu::{self, Buffer, Gpu, Outcome, ProbeParams, launch};
use crate::report::Section;

const SEQUENCES: u64 = 8;
/// Baseline: the time to map the whole pool at first.
const MAPPED: &str = "memory mapped";
/// Baseline: a step without a resize beside it.
const STEP: &str = "a step alone";
/// Bytes that the driver may take for itself meanwhile.
const DRIVERS_OWN: u32 = 8 << 20;
/// Timeout, longer than a step takes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Shrinks to an eighth and grows again.
///
/// # Errors
/// An error of the device or of the pool.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    // Memory is mapped in steps of at least 32 MiB of each plane, or a 64th of it. A pool of fewer
    // steps would return little.
    let (layout, blocks, segment) = if options.quick {
        (KvLayout::named("tiny")?, 8192, Some(256))
    } else {
        (KvLayout::named("qwen2.5-7b")?, 8192, None)
    };
    let layout = if options.quick { wide(&layout)? } else { layout };
    let free = || gpu.context.mem_get_info().map(|(free, _)| free as f64);
    let before = free()?;
    let begin = Instant::now();
    let config =
        segment.map_or_else(CudaConfig::default, |frames| CudaConfig::default().segment_frames(frames));
    let storage = CudaStorage::with_config(&gpu.device, layout.clone(), blocks + 1, blocks + 1, config)?;
    let mapped = begin.elapsed().as_secs_f64() * 1e3;
    section.figure(MAPPED, mapped, "ms");
    let pool = Pool::builder(layout.clone()).blocks(blocks).storage(Arc::new(storage)).build()?;
    let built = free()?;
    section.figure("memory taken", (before - built) / f64::from(1 << 20), "MiB");

    // In the last frames, so that they have to move.
    let ballast = pool.allocate_owned(AllocRequest::new(blocks - 64 * SEQUENCES as usize))?;
    let mut sequences = Vec::new();
    for id in 0..SEQUENCES {
        let mut sequence = pool.sequence(SequenceId(id)).open()?;
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 60 * layout.block_tokens())?;
        write(&mut batch, &mut sequence, &layout)?;
        batch.finish();
        sequences.push(sequence);
    }
    drop(ballast);
    let runtime = gpu::runtime()?;
    let steps = Steps::new(gpu, options)?;
    let pause = || {
        std::thread::sleep(steps.pause);
        Ok(())
    };
    let ((), alone) = steps.during(&pool, pause)?;
    let alone = section.latency(STEP, alone);
    let begin = Instant::now();
    let (report, beside) = steps.during(&pool, || Ok(runtime.block_on(pool.resize(blocks / 8))?))?;
    let took = begin.elapsed().as_secs_f64() * 1e3;
    section.ratio("shrunk to an eighth", took, "ms", took / mapped, MAPPED);
    section.latency_of("a step while the pool shrinks", beside, alone, "a step alone, p50");
    section.figure("blocks moved out of the way", report.moved.moved_blocks as f64, "blocks");
    let small = free()?;
    let (returned, taken) = (small - built, before - built);
    section.ratio("memory returned", returned / f64::from(1 << 20), "MiB", returned / taken, "memory taken");
    section.check(
        "most of the memory was returned",
        returned > 0.6 * taken,
        format!("{:.1} %", 100.0 * returned / taken),
    );
    let wrong = verify(&pool, &sequences, &layout)?;
    section.check("bytes after the shrink", wrong == 0, format!("{wrong} rows differ"));
    let begin = Instant::now();
    let (_, beside) = steps.during(&pool, || Ok(runtime.block_on(pool.resize(blocks))?))?;
    let took = begin.elapsed().as_secs_f64() * 1e3;
    section.ratio("grown again", took, "ms", took / mapped, MAPPED);
    section.latency_of("a step while the pool grows", beside, alone, "a step alone, p50");
    let wrong = verify(&pool, &sequences, &layout)?;
    section.check("bytes after growing", wrong == 0, format!("{wrong} rows differ"));
    drop((sequences, steps));
    pool.audit()?;
    drop(pool);
    let after = free()?;
    section.check(
        "all memory is returned at the end",
        // The driver keeps a few MiB of its own, which it takes when it needs them.
        (before - after).abs() <= (0.01 * taken).max(f64::from(DRIVERS_OWN)),
        format!("{:.1} MiB are missing", (before - after) / f64::from(1 << 20)),
    );
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
        let rounds = self.rounds;
        let params = ProbeParams { from: 0, to: self.result.address(), vectors: 0, rounds, reserved: 0 };
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
                        runtime.block_on(async { tokio::time::timeout(PATIENCE, ended).await })??;
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

/// Returns a layout of one layer whose planes have many times the device's granule of 2 MiB.
fn wide(layout: &KvLayout) -> Outcome<KvLayout> {
    let builder = KvLayout::builder().layers(1).kv_heads(2).head_dim(64).dtype(layout.dtype());
    Ok(builder.block_tokens(16).build()?)
}

/// Returns K or V of a token: numbers that differ between neighbouring tokens and halves.
fn row(layout: &KvLayout, id: u64, token: usize, half: usize) -> Vec<bf16> {
    let elements = layout.row_elements();
    (0..elements)
        .map(|at| bf16::from_f32(((id as usize * 131 + token * 7 + half * 3 + at) % 251) as f32))
        .collect()
}

fn layers(layout: &KvLayout) -> [usize; 2] {
    [0, layout.layers() - 1]
}

fn rows(layout: &KvLayout, id: u64, tokens: usize, half: usize) -> Vec<bf16> {
    assert_eq!(layout.dtype(), Dtype::Bf16, "the rows written here are bf16");
    (0..tokens).flat_map(|token| row(layout, id, token, half)).collect()
}

fn write(batch: &mut kvpool::Batch, sequence: &mut Sequence, layout: &KvLayout) -> Outcome<()> {
    let (id, tokens) = (sequence.id().0, sequence.len());
    let (k, v) = (rows(layout, id, tokens, 0), rows(layout, id, tokens, 1));
    for layer in layers(layout) {
        batch.store(sequence, layer, 0..tokens, Elements::from(&k), Elements::from(&v))?;
    }
    Ok(())
}

/// Returns the number of rows that differ from what was written.
fn verify(pool: &Pool, sequences: &[Sequence], layout: &KvLayout) -> Outcome<usize> {
    let mut wrong = 0;
    for sequence in sequences {
        let (id, tokens) = (sequence.id().0, sequence.len());
        let mut batch = pool.begin_batch();
        for layer in layers(layout) {
            let mut got = [
                vec![bf16::ZERO; tokens * layout.row_elements()],
                vec![bf16::ZERO; tokens * layout.row_elements()],
            ];
            let [k, v] = &mut got;
            batch.load(sequence, layer, 0..tokens, ElementsMut::from(k), ElementsMut::from(v))?;
            for (half, got) in got.iter().enumerate() {
                let want = rows(layout, id, tokens, half);
                let width = layout.row_elements();
                wrong += got.chunks(width).zip(want.chunks(width)).filter(|(got, want)| got != want).count();
            }
        }
    }
    Ok(wrong)
}
