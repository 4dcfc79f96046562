//! Measures offloading and bringing back: frames packed to host memory and unpacked from it,
//! relative to the best copy over the bus; by every way that such copies take.

use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use kvpool::storage::{Arrangement, Dtype, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::Work;
use kvpool_cuda::{CudaConfig, CudaStorage};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, ProbeParams, launch, rate, time_host};
use crate::report::Section;

/// Baseline: one copy of all bytes between the device and pinned memory.
const PINNED: &str = "one copy of pinned memory";
/// Baseline: one copy of all bytes within the host.
const MEMCPY: &str = "memcpy on one thread of the host";

/// What this section launches.
pub const WORKS: &[Work] = &[Work::Pack, Work::Unpack, Work::ToPages, Work::FromPages, Work::Zero];

/// Measures both directions.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (layout, frames, times) = sizes(options)?;
    let bytes = frames * layout.packed_bytes();
    let (down, up) = pinned(gpu, bytes, times)?;
    section.figure("device to host, pinned", rate(bytes, down), "GB/s");
    section.figure("host to device, pinned", rate(bytes, up), "GB/s");

    // What a copy through the host's own caches costs beside: one thread.
    let source = Rng(3).bytes(bytes);
    let mut target = vec![0u8; bytes];
    let copy = || {
        target.copy_from_slice(std::hint::black_box(&source));
        Outcome::Ok(())
    };
    let plain = time_host(times, copy)?;
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
    let unpacked = time_host(times, || unsafe { device.unpack(&scattered, &packed) })?;
    section.ratio("frames brought back from a buffer", rate(bytes, unpacked), "GB/s", up / unpacked, PINNED);
    packed.fill(0);
    // SAFETY: as above.
    let took = time_host(times, || unsafe { device.pack(&scattered, &mut packed) })?;
    section.ratio("frames offloaded to a buffer", rate(bytes, took), "GB/s", down / took, PINNED);
    section.ratio("the same, relative to the host", rate(bytes, took), "GB/s", plain / took, MEMCPY);
    section.check("offloaded bytes come back unchanged", packed == written, format!("{frames} frames"));

    let block_first = of(&layout, Arrangement::BlockFirst)?;
    beside(gpu, section, &block_first, &written, down + up)?;

    // A pool's frames: locked pages, in runs and scattered; and pinned buffers.
    let staging = CudaConfig::default().host_bytes_max(0);
    let staged = CudaStorage::with_config(&gpu.device, layout.clone(), frames, frames, staging)?;
    // SAFETY: as above.
    unsafe { staged.unpack(&scattered, &written)? };
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
        // SAFETY: as above.
        let first = time_host(1, || unsafe { host.receive(storage, from, runs) })?;
        section.figure(format!("first copy, which locks pages: {what}"), first, "ms");
        // SAFETY: as above.
        let took = time_host(times, || unsafe { host.receive(storage, from, runs) })?;
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
        let took = time_host(times, || unsafe { storage.receive(&host, runs, from) })?;
        section.ratio(format!("frames brought back: {what}"), rate(bytes, took), "GB/s", up / took, PINNED);
        packed.fill(0);
        // SAFETY: as above.
        unsafe { storage.pack(from, &mut packed)? };
        section.check(format!("bytes brought back: {what}"), packed == written, format!("{frames} frames"));
    }
    Ok(())
}

/// Returns the layout, the number of frames, and how often they are copied.
pub fn sizes(options: &Options) -> Outcome<(KvLayout, usize, usize)> {
    if !options.quick {
        return Ok((KvLayout::named("qwen2.5-7b")?, 512, 5));
    }
    // Large enough for copies without buffers, which pay from 64 KiB on.
    let quick = KvLayout::builder().layers(2).kv_heads(8).head_dim(128).block_tokens(16);
    Ok((quick.dtype(Dtype::F16).build()?, 8, 2))
}

/// Returns a layout of the same blocks in another arrangement.
pub fn of(layout: &KvLayout, arrangement: Arrangement) -> Outcome<KvLayout> {
    let builder = KvLayout::builder().layers(layout.layers()).kv_heads(layout.kv_heads());
    let builder =
        builder.head_dim(layout.head_dim()).block_tokens(layout.block_tokens()).dtype(layout.dtype());
    Ok(builder.parts(layout.parts()).arrangement(arrangement).build()?)
}

/// Returns the time in milliseconds of one copy from the device, and of one to it.
fn pinned(gpu: &Gpu, bytes: usize, times: usize) -> Outcome<(f64, f64)> {
    let (stream, _) = gpu.stream()?;
    let buffer = gpu.buffer(bytes)?;
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: filled before it is read.
    let mut host = unsafe { gpu.context.alloc_pinned_with_flags::<u8>(bytes, flags)? };
    let (host, at, stream_at) = (host.as_mut_slice()?, buffer.address(), stream.cu_stream());
    host.fill(1);
    // SAFETY: both have the same length, and are kept until the stream has been waited for.
    let down = gpu.time(&stream, times, || unsafe { result::memcpy_dtoh_async(host, at, stream_at) })?;
    // SAFETY: as above.
    let up = gpu.time(&stream, times, || unsafe { result::memcpy_htod_async(at, host, stream_at) })?;
    stream.synchronize()?;
    Ok((down, up))
}

/// Measures copies in both directions at once, and what else passes meanwhile: wipes while frames
/// are copied, and a thread's launches while another one locks pages.
fn beside(gpu: &Gpu, section: &mut Section, layout: &KvLayout, written: &[u8], both: f64) -> Outcome<()> {
    let frames = written.len() / layout.packed_bytes();
    let device = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
    let host = || HostStorage::new(layout.clone(), frames, frames);
    let (down, up, half) = (host()?, host()?, frames as u32 / 2);
    let bytes = |frames: u32| frames as usize * layout.packed_bytes();
    let run = |start: u32, len: u32| [Run { start: FrameId(start), len }];
    let (lower, upper, wiped) = (run(0, half - 1), run(half, half), run(half - 1, 1));
    let (stream, _) = gpu.stream()?;
    let (kernel, result) = (gpu.probe("kvp_probe_burn")?, gpu.buffer(16)?);
    let launches_until = |is_over: &dyn Fn() -> bool| -> Outcome<Vec<Duration>> {
        let mut took = Vec::new();
        while took.is_empty() || !is_over() {
            took.push(gpu::took(|| {
                // SAFETY: writes at most the result.
                unsafe { launch(&stream, &kernel, 1, &ProbeParams::burn(result.address(), 1))? };
                Outcome::Ok(stream.synchronize()?)
            })?);
        }
        Ok(took)
    };
    let begin = Instant::now();
    let idle = launches_until(&|| begin.elapsed() > Duration::from_millis(20))?;
    let idle = section.latency("a short kernel launched and waited for", idle, None);
    let (took, are_locked) = thread::scope(|scope| {
        let locking = scope.spawn(|| [&down, &up].map(|host| device.lock_pages(host)));
        let took = launches_until(&|| locking.is_finished());
        (took, locking.join().is_ok_and(|locked| locked == [true; 2]))
    });
    let took = took?;
    let longest = took.iter().max().copied().unwrap_or_default();
    section.latency("the same while another thread locks pages", took, Some((idle, "the same alone")));
    section.figure("the longest of them", longest.as_secs_f64() * 1e3, "ms");
    section.check("pages are locked", are_locked, "of two pools");
    // SAFETY: no one else uses these storages.
    unsafe {
        device.unpack(&run(0, half), &written[..bytes(half)])?;
        up.unpack(&run(0, frames as u32), written)?;
    }
    let begin = Instant::now();
    let wipes = thread::scope(|scope| {
        // SAFETY: no two threads use the same frames.
        let offloading = scope.spawn(|| unsafe { down.receive(&device, &lower, &lower) });
        // SAFETY: as above.
        let returning = scope.spawn(|| unsafe { device.receive(&up, &upper, &upper) });
        let mut wipes = Vec::new();
        while wipes.is_empty() || !(offloading.is_finished() && returning.is_finished()) {
            // SAFETY: as above.
            wipes.push(gpu::took(|| unsafe { device.zero(&wiped) })?);
        }
        offloading.join().map_err(|_| "a copy panicked")??;
        returning.join().map_err(|_| "a copy panicked")??;
        Outcome::Ok(wipes)
    })?;
    let took = begin.elapsed().as_secs_f64() * 1e3;
    let what = "frames offloaded and brought back at the same time, a half each";
    let of = "two copies of pinned memory, one after the other";
    section.ratio(what, rate(written.len(), took), "GB/s", both / 2.0 / took, of);
    section.latency("a frame wiped meanwhile", wipes, None);
    let (mut out, mut back) = (vec![0; bytes(half - 1)], vec![0; bytes(half)]);
    // SAFETY: no one else uses these storages.
    unsafe {
        down.pack(&lower, &mut out)?;
        device.pack(&upper, &mut back)?;
    }
    let are_same = out == written[..out.len()] && back == written[bytes(half)..][..back.len()];
    section.check("bytes of both directions", are_same, format!("{frames} frames"));
    Ok(())
}
