//! Measures offloading and bringing back: frames packed to host memory and unpacked from it,
//! relative to the best copy over the bus.

use std::time::Instant;

use cudarc::driver::{result, sys};
use kvpool::cuda::CudaStorage;
use kvpool::storage::{HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};

use crate::Options;
use crate::gpu::{Gpu, Outcome};
use crate::report::Section;

const PINNED: &str = "one copy of pinned memory";

/// Measures both directions.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (layout, frames) =
        if options.quick { (KvLayout::named("tiny")?, 8) } else { (KvLayout::named("qwen2.5-7b")?, 512) };
    let bytes = frames * layout.packed_bytes();
    let times = if options.quick { 2 } else { 5 };
    let (down, up) = pinned(gpu, bytes, times)?;
    section.figure("device to host, pinned", rate(bytes, down), "GB/s");
    section.figure("host to device, pinned", rate(bytes, up), "GB/s");

    let device = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
    let host = HostStorage::new(layout, frames, frames)?;
    // In reverse order, so that no two frames form a run.
    let all = [Run { start: FrameId(0), len: frames as u32 }];
    let scattered: Vec<Run> =
        (0..frames as u32).rev().map(|frame| Run { start: FrameId(frame), len: 1 }).collect();
    let mut packed: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 253) as u8).collect();
    let written = packed.clone();
    // SAFETY: no one else uses these storages.
    let unpacked = median(times, || unsafe { device.unpack(&scattered, &packed) })?;
    section.ratio("frames brought back from a buffer", rate(bytes, unpacked), "GB/s", up / unpacked, PINNED);
    packed.fill(0);
    // SAFETY: as above.
    let took = median(times, || unsafe { device.pack(&scattered, &mut packed) })?;
    section.ratio("frames offloaded to a buffer", rate(bytes, took), "GB/s", down / took, PINNED);
    section.check("offloaded bytes come back unchanged", packed == written, format!("{frames} frames"));
    // SAFETY: as above.
    let took = median(times, || unsafe { host.receive(&device, &scattered, &all) })?;
    section.ratio("frames offloaded to a pool's frames", rate(bytes, took), "GB/s", down / took, PINNED);
    // SAFETY: as above.
    let took = median(times, || unsafe { device.receive(&host, &all, &scattered) })?;
    section.ratio("frames brought back from a pool's frames", rate(bytes, took), "GB/s", up / took, PINNED);
    packed.fill(0);
    // SAFETY: as above.
    unsafe { device.pack(&scattered, &mut packed)? };
    section.check("bytes come back unchanged through a pool", packed == written, format!("{frames} frames"));
    Ok(())
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
    took.sort_by(f64::total_cmp);
    Ok(took[took.len() / 2])
}
