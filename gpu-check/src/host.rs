//! Measures offloading and bringing back: frames packed to host memory and unpacked from it,
//! relative to the best copy over the bus; by every way that such copies take.

use std::time::Instant;

use cudarc::driver::{result, sys};
use kvpool::storage::{Arrangement, Dtype, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::{HOST_CTAS, Kernel, Shape, Work};
use kvpool_cuda::params::{PIECE_BYTES_MAX, PackParams, THREADS, Way};
use kvpool_cuda::{CudaConfig, CudaStorage};

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, layer_first};
use crate::report::Section;

/// Baseline: one copy of all bytes between the device and pinned memory.
const PINNED: &str = "one copy of pinned memory";
/// Baseline: one copy of all bytes within the host.
const MEMCPY: &str = "memcpy on one thread of the host";

/// What this section launches, beside other shapes.
pub const WORKS: &[Work] = &[Work::ToPages, Work::FromPages];

/// Measures both directions.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (layout, frames) = if options.quick {
        // Large enough for copies without buffers, which pay from 64 KiB on.
        let quick = KvLayout::builder().layers(2).kv_heads(8).head_dim(128).block_tokens(16);
        (quick.dtype(Dtype::F16).build()?, 8)
    } else {
        (KvLayout::named("qwen2.5-7b")?, 512)
    };
    let bytes = frames * layout.packed_bytes();
    let times = if options.quick { 2 } else { 5 };
    let (down, up) = pinned(gpu, bytes, times)?;
    section.figure("device to host, pinned", rate(bytes, down), "GB/s");
    section.figure("host to device, pinned", rate(bytes, up), "GB/s");

    // What a copy through the host's own caches costs beside: one thread.
    let source: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 253) as u8).collect();
    let mut target = vec![0u8; bytes];
    let plain = median(times, || {
        target.copy_from_slice(std::hint::black_box(&source));
        Outcome::Ok(())
    })?;
    section.figure(MEMCPY, rate(bytes, plain), "GB/s");
    section.check("bytes of the memcpy", target == source, format!("{bytes} bytes"));

    // Beside `down` and `up`, the times of one copy of pinned memory.
    let device = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
    let all = [Run { start: FrameId(0), len: frames as u32 }];
    // In reverse order, so that no two frames form a run.
    let scattered: Vec<Run> =
        (0..frames as u32).rev().map(|frame| Run { start: FrameId(frame), len: 1 }).collect();
    let mut packed = source;
    let written = packed.clone();
    // SAFETY: no one else uses these storages.
    let unpacked = median(times, || unsafe { device.unpack(&scattered, &packed) })?;
    section.ratio("frames brought back from a buffer", rate(bytes, unpacked), "GB/s", up / unpacked, PINNED);
    packed.fill(0);
    // SAFETY: as above.
    let took = median(times, || unsafe { device.pack(&scattered, &mut packed) })?;
    section.ratio("frames offloaded to a buffer", rate(bytes, took), "GB/s", down / took, PINNED);
    section.ratio("the same, relative to the host", rate(bytes, took), "GB/s", plain / took, MEMCPY);
    section.check("offloaded bytes come back unchanged", packed == written, format!("{frames} frames"));

    by_kernel(gpu, options, section, (down, up, bytes))?;

    // A pool's frames: locked pages, in runs and scattered; and pinned buffers.
    let staging = CudaConfig::default().host_bytes_max(0);
    let staged = CudaStorage::with_config(&gpu.device, layout.clone(), frames, frames, staging)?;
    // SAFETY: as above.
    unsafe { staged.unpack(&scattered, &written)? };
    let block_first = of(&layout, Arrangement::BlockFirst)?;
    let layer_first = of(&layout, Arrangement::LayerFirst)?;
    // Where both sides cut their frames alike, no kernel packs them.
    let alike = CudaStorage::new(&gpu.device, block_first.clone(), frames, frames)?;
    let (run, apart) = (&all[..], &scattered[..]);
    for (what, storage, from, layout, runs) in [
        ("block-first, in a run", &device, apart, &block_first, run),
        ("block-first, scattered", &device, apart, &block_first, apart),
        ("layer-first, in a run", &device, apart, &layer_first, run),
        ("layer-first, scattered", &device, apart, &layer_first, apart),
        ("block-first as the device's, in runs", &alike, run, &block_first, run),
        ("block-first as the device's, scattered", &alike, apart, &block_first, run),
        ("layer-first as the device's, in runs", &device, run, &layer_first, run),
        ("block-first, through pinned buffers", &staged, apart, &block_first, run),
        ("layer-first, through pinned buffers", &staged, apart, &layer_first, run),
    ] {
        let host = HostStorage::new(layout.clone(), frames, frames)?;
        // SAFETY: as above.
        unsafe { storage.unpack(from, &written)? };
        let begin = Instant::now();
        // SAFETY: as above.
        unsafe { host.receive(storage, from, runs)? };
        section.figure(
            format!("first copy, which locks pages: {what}"),
            begin.elapsed().as_secs_f64() * 1e3,
            "ms",
        );
        // SAFETY: as above.
        let took = median(times, || unsafe { host.receive(storage, from, runs) })?;
        let rated = rate(bytes, took);
        section.ratio(format!("frames offloaded: {what}"), rated, "GB/s", down / took, PINNED);
        // SAFETY: as above.
        unsafe {
            host.pack(runs, &mut packed)?;
            // Other bytes, which must be overwritten.
            storage.zero(&all)?;
        }
        section.check(format!("bytes offloaded: {what}"), packed == written, format!("{frames} frames"));
        // SAFETY: as above.
        let took = median(times, || unsafe { storage.receive(&host, runs, from) })?;
        section.ratio(format!("frames brought back: {what}"), rate(bytes, took), "GB/s", up / took, PINNED);
        packed.fill(0);
        // SAFETY: as above.
        unsafe { storage.pack(from, &mut packed)? };
        section.check(format!("bytes brought back: {what}"), packed == written, format!("{frames} frames"));
    }
    Ok(())
}

/// Returns a layout of the same blocks in another arrangement.
fn of(layout: &KvLayout, arrangement: Arrangement) -> Outcome<KvLayout> {
    let builder = KvLayout::builder().layers(layout.layers()).kv_heads(layout.kv_heads());
    let builder =
        builder.head_dim(layout.head_dim()).block_tokens(layout.block_tokens()).dtype(layout.dtype());
    Ok(builder.parts(layout.parts()).arrangement(arrangement).build()?)
}

/// Returns the time in seconds of one copy from the device, and of one to it.
fn pinned(gpu: &Gpu, bytes: usize, times: usize) -> Outcome<(f64, f64)> {
    let (stream, _) = gpu.stream()?;
    let buffer = gpu.buffer(bytes)?;
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: filled before it is read.
    let mut host = unsafe { gpu.context.alloc_pinned_with_flags::<u8>(bytes, flags)? };
    host.as_mut_slice()?.fill(1);
    let down = gpu.time(&stream, times, || {
        // SAFETY: both have the same length, and are kept until the stream has been waited for.
        unsafe { result::memcpy_dtoh_async(host.as_mut_slice()?, buffer.address(), stream.cu_stream())? };
        Ok(())
    })?;
    let up = gpu.time(&stream, times, || {
        // SAFETY: as above.
        unsafe { result::memcpy_htod_async(buffer.address(), host.as_slice()?, stream.cu_stream())? };
        Ok(())
    })?;
    stream.synchronize()?;
    Ok((down / 1e3, up / 1e3))
}

/// Measures the kernel that copies packed frames to locked pages, and from there, by its number of
/// CTAs: layer-first frames in reverse order.
fn by_kernel(
    gpu: &Gpu,
    options: &Options,
    section: &mut Section,
    (down, up, bytes): (f64, f64, usize),
) -> Outcome<()> {
    let (planes, times) = (56, if options.quick { 2 } else { 5 });
    let frames = bytes / (planes * PIECE_BYTES_MAX as usize);
    let Some(frames) = (frames > 0).then_some(frames) else { return Ok(()) };
    let moved = frames * planes * PIECE_BYTES_MAX as usize;
    let (stream, _) = gpu.stream()?;
    let packed = gpu.buffer(moved)?;
    // SAFETY: filled before it is read.
    let mut host =
        unsafe { gpu.context.alloc_pinned_with_flags::<u8>(moved, sys::CU_MEMHOSTALLOC_PORTABLE)? };
    host.as_mut_slice()?.fill(1);
    let pieces = layer_first(host.as_slice()?.as_ptr() as u64, planes, frames, PIECE_BYTES_MAX);
    let table = gpu.upload(&pieces)?;
    let list = gpu.upload(&(0..frames as u32).rev().collect::<Vec<u32>>())?;
    let params = |way| PackParams {
        pieces: table.address(),
        frames: list.address(),
        packed: packed.address(),
        packed_stride: (planes * PIECE_BYTES_MAX as usize) as u64,
        n_pieces: pieces.len() as u32,
        n_frames: frames as u32,
        unit: 16,
        way,
    };
    for ctas in [4, 8, HOST_CTAS, 32, 64, 132, 528] {
        let shape = Shape { ctas, threads: THREADS, shared_bytes: 0 };
        for (way, what, best) in [(Way::In, "to", down), (Way::Out, "from", up)] {
            let took = gpu.time(&stream, times, || {
                // SAFETY: all memory is kept until the stream has been waited for.
                unsafe { gpu.launch_as(&stream, Kernel::Pack, shape, &params(way)) }
            })?;
            let took = took / 1e3 * bytes as f64 / moved as f64;
            let what = format!("packed frames {what} locked pages by a kernel of {ctas} CTAs");
            section.ratio(what, rate(bytes, took), "GB/s", best / took, PINNED);
        }
    }
    stream.synchronize()?;
    Ok(())
}

/// Returns a rate in GB/s.
fn rate(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / 1e9 / seconds
}

/// Returns the median time in seconds.
fn median<E: Into<Box<dyn std::error::Error>>>(
    times: usize,
    mut work: impl FnMut() -> Result<(), E>,
) -> Outcome<f64> {
    let mut took = Vec::with_capacity(times);
    for _ in 0..times {
        let begin = Instant::now();
        work().map_err(Into::into)?;
        took.push(begin.elapsed().as_secs_f64());
    }
    Ok(gpu::median(took))
}
