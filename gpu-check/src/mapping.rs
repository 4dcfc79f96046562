//! Measures how long memory takes to be mapped and unmapped, by the size of the step; and copies over
//! memory that is mapped so.

use std::time::{Duration, Instant};

use kvpool::storage::{Arrangement, Dtype, KvLayout, Storage};
use kvpool_cuda::launch::Work;
use kvpool_cuda::params::{CopyParams, Move};
use kvpool_cuda::{CudaConfig, CudaStorage};

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, distinct, layer_first, rate, took};
use crate::report::Section;
use crate::sample;

/// Frames have 2 MiB, so that a step of `n` frames maps `2 * n` MiB.
const FRAME_BYTES: usize = 2 << 20;

/// Memory over which frames are scattered, if the device has as much: more than its caches of address
/// translations cover.
const SPREAD_BYTES: usize = 100 << 30;

/// Number of frames that are copied in it. A power of two, coprime to the steps between them.
const MOVED: usize = 512;

/// What this section launches itself.
pub const WORKS: &[Work] = &[Work::Wave];

/// Grows and shrinks storages whose frames are mapped in steps of several sizes.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (times, sizes): (usize, &[usize]) =
        if options.quick { (2, &[1, 2]) } else { (15, &[1, 4, 16, 64, 256]) };
    // K and V of one layer, next to each other in a block.
    let layout = KvLayout::builder().layers(1).kv_heads(8).head_dim(1024).block_tokens(64).dtype(Dtype::Bf16);
    let layout = layout.arrangement(Arrangement::BlockFirst).build()?;
    assert_eq!(layout.packed_bytes(), FRAME_BYTES);
    for &frames in sizes {
        let config = CudaConfig::default().segment_frames(frames);
        let storage = CudaStorage::with_config(&gpu.device, layout.clone(), frames, 2 * frames, config)?;
        let small = storage.mapped_bytes();
        let (mut grown, mut shrunk) = (Vec::new(), Vec::new());
        let mut exact = true;
        for _ in 0..times {
            grown.push(took(|| storage.grow(2 * frames))?);
            exact &= storage.mapped_bytes() == 2 * small;
            let begin = Instant::now();
            // SAFETY: no one else uses the storage.
            unsafe { storage.shrink(frames) };
            shrunk.push(begin.elapsed());
            exact &= storage.mapped_bytes() == small;
        }
        let mib = (frames * FRAME_BYTES) >> 20;
        section.check(format!("{mib} MiB mapped and unmapped"), exact, format!("{small} bytes at the end"));
        // The same by the driver's allocator.
        let (stream, _) = gpu.stream()?;
        let (mut taken, mut freed) = (Vec::new(), Vec::new());
        for _ in 0..times {
            let mut buffer = None;
            taken.push(took(|| {
                buffer.insert(gpu.buffer(frames * FRAME_BYTES)?).fill(&stream, 0)?;
                Outcome::Ok(stream.synchronize()?)
            })?);
            let begin = Instant::now();
            drop(buffer);
            freed.push(begin.elapsed());
        }
        section.figure(format!("{mib} MiB allocated by cuMemAlloc and zeroed"), median(&taken) * 1e6, "us");
        section.figure(format!("{mib} MiB freed by cuMemFree"), median(&freed) * 1e6, "us");
        let per_gib = |times: &[Duration]| median(times) * 1e3 * 1024.0 / mib as f64;
        let (what, own) = (format!("{mib} MiB mapped and zeroed in one step"), median(&grown));
        section.ratio(what, own * 1e6, "us", own / median(&taken).max(1e-9), "cuMemAlloc of these bytes");
        let (what, own) = (format!("{mib} MiB unmapped in one step"), median(&shrunk));
        section.ratio(what, own * 1e6, "us", own / median(&freed).max(1e-9), "cuMemFree of these bytes");
        section.figure("1 GiB in such steps, mapped and zeroed", per_gib(&grown), "ms");
        storage.close()?;
    }
    spread(gpu, options, section, &layout)
}

/// Baseline: the same copies within one allocation.
const WHOLE: &str = "in one allocation of that size";

/// Copies frames that are scattered over most of the device's memory: mapped by segments, and in one
/// allocation. The difference is that of the translation of addresses.
fn spread(gpu: &Gpu, options: &Options, section: &mut Section, layout: &KvLayout) -> Outcome<()> {
    let (free, _) = gpu.context.mem_get_info()?;
    let bytes = if options.quick { 16 * FRAME_BYTES } else { SPREAD_BYTES.min(free / 10 * 7) };
    let (frames, times) = (bytes / FRAME_BYTES, if options.quick { 2 } else { 7 });
    let moved = MOVED.min(frames / 2);
    // Evenly over all frames, from the lower half to the upper one, in no order.
    let half = frames / 2;
    let place = |at: usize| at * 7919 % moved * half / moved;
    let moves: Vec<Move> = (0..moved)
        .map(|at| Move { src: place(at) as u32, dst: (half + place(at * 31 + 5)) as u32 })
        .collect();
    distinct(&moves)?;
    let stream = gpu.stream_for(Work::Wave)?;
    let list = gpu.upload(&moves)?;
    let mut measure = |base: u64| -> Outcome<f64> {
        let pieces = layer_first(base, 1, frames, FRAME_BYTES as u32);
        let table = gpu.upload(&pieces)?;
        let params = CopyParams::new((table.address(), pieces.len()), (list.address(), moved), 16);
        let tiles = moves.iter().step_by(moved.div_ceil(8)).map(|step| {
            let at = |frame: u32| base + u64::from(frame) * FRAME_BYTES as u64;
            (at(step.src), at(step.dst))
        });
        let samples = sample::plant(gpu, FRAME_BYTES, tiles)?;
        let time = gpu.time(&stream, times, || {
            // SAFETY: the table, the list and the frames are kept until the stream has been waited for.
            unsafe { gpu.device.kernels().launch(stream.cu_stream(), Work::Wave, &params) }
        })?;
        let what = format!("frames copied over {} GiB", bytes >> 30);
        sample::check(gpu, &stream, section, what, &samples)?;
        Ok(time)
    };
    let whole = {
        let one = gpu.buffer(bytes)?;
        measure(one.address())?
    };
    let mapped = {
        let storage = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
        let base = storage.planes()?.tensors().map(|tensor| tensor.data.addr() as u64).min();
        let time = measure(base.ok_or("a storage without planes")?)?;
        storage.close()?;
        time
    };
    let rate = |time| rate(2 * moved * FRAME_BYTES, time);
    let what = format!("{moved} frames of 2 MiB copied over {:.1} GiB", bytes as f64 / f64::from(1 << 30));
    section.figure(format!("{what}, {WHOLE}"), rate(whole), "GB/s");
    section.ratio(format!("{what}, mapped by segments"), rate(mapped), "GB/s", whole / mapped, WHOLE);
    Ok(())
}

/// Returns the median in seconds.
fn median(times: &[Duration]) -> f64 {
    gpu::median(times.iter().map(Duration::as_secs_f64).collect())
}
