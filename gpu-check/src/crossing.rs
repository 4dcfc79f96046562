//! Measures frames that another device gets, and sends at the same time, relative to one copy of
//! all bytes between the devices.

use std::thread;
use std::time::Instant;

use cudarc::driver::sys;
use kvpool::storage::{Arrangement, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::Work;
use kvpool_cuda::{CudaStorage, Device, DeviceInfo};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{Gpu, Outcome, rate, time_host};
use crate::host::{of, sizes};
use crate::report::Section;

/// Baseline: one copy of all bytes by the driver.
const PEER: &str = "one copy of these bytes between the devices";

/// What this section launches, on both devices.
pub const WORKS: &[Work] = &[Work::Send, Work::Unpack, Work::Pack, Work::Zero];

/// Measures copies to the first other device that can be used.
///
/// # Errors
/// An error of either device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let is_other = |info: &DeviceInfo| info.ordinal != gpu.ordinal && info.unusable.is_none();
    let Some(info) = kvpool_cuda::devices()?.into_iter().find(is_other) else {
        section.check("two devices", true, "not measured: no other device can be used");
        return Ok(());
    };
    let begin = Instant::now();
    let opened = match Device::open_with(info.ordinal.into(), gpu.device.kernels().choices) {
        Err(error) if info.is_exclusive => {
            section.check("two devices", true, format!("not measured: cuda:{}: {error}", info.ordinal));
            return Ok(());
        }
        opened => opened?,
    };
    let other = Gpu::over(opened, begin.elapsed())?;
    let (layout, frames, times) = sizes(options)?;
    for (what, layout) in [
        ("layer-first", of(&layout, Arrangement::LayerFirst)?),
        ("block-first", of(&layout, Arrangement::BlockFirst)?),
    ] {
        let storage = |gpu: &Gpu| CudaStorage::new(&gpu.device, layout.clone(), frames, frames);
        let (near, far) = (storage(gpu)?, storage(&other)?);
        let (bytes, half) = (frames * layout.packed_bytes(), frames as u32 / 2);
        let written = Rng(2).bytes(bytes);
        let run = |start, len| [Run { start: FrameId(start), len }];
        let all = run(0, frames as u32);
        // SAFETY: no one else uses these storages.
        unsafe { near.unpack(&all, &written)? };
        // Also gives each context access to the other one's memory, for the baseline. SAFETY: as above.
        unsafe { far.receive(&near, &all, &all)? };
        let alone = peer_copy(gpu, &other, bytes, times)?;
        section.figure(format!("{PEER}, {what}"), rate(bytes, alone), "GB/s");
        // SAFETY: as above.
        let took = time_host(times, || unsafe { far.receive(&near, &all, &all) })?;
        section.ratio(format!("frames sent, {what}"), rate(bytes, took), "GB/s", alone / took, PEER);
        // SAFETY: as above.
        unsafe { near.zero(&all)? };
        // SAFETY: as above.
        let took = time_host(times, || unsafe { near.receive(&far, &all, &all) })?;
        section.ratio(format!("frames received, {what}"), rate(bytes, took), "GB/s", alone / took, PEER);
        let (lower, upper) = (run(0, half), run(half, frames as u32 - half));
        // SAFETY: as above; the halves that are written are the other ones.
        unsafe { (near.zero(&upper)?, far.zero(&lower)?) };
        let both = || -> Outcome<()> {
            thread::scope(|scope| {
                // SAFETY: no two threads use the same frames.
                let sent = scope.spawn(|| unsafe { far.receive(&near, &lower, &lower) });
                // SAFETY: as above.
                unsafe { near.receive(&far, &upper, &upper)? };
                Ok(sent.join().map_err(|_| "a copy panicked")??)
            })
        };
        let took = time_host(times, both)?;
        let both = format!("frames sent and received at the same time, a half each, {what}");
        section.ratio(both, rate(bytes, took), "GB/s", alone / took, PEER);
        for (storage, place) in [(&near, "here"), (&far, "there")] {
            let mut packed = vec![0; bytes];
            // SAFETY: as above.
            unsafe { storage.pack(&all, &mut packed)? };
            section.check(format!("bytes {place}, {what}"), packed == written, format!("{frames} frames"));
        }
    }
    Ok(())
}

/// Returns the time in milliseconds of one copy to the other device.
fn peer_copy(gpu: &Gpu, other: &Gpu, bytes: usize, times: usize) -> Outcome<f64> {
    let (from, to, (stream, _)) = (gpu.buffer(bytes)?, other.buffer(bytes)?, gpu.stream()?);
    let (here, there) = (gpu.context.cu_ctx(), other.context.cu_ctx());
    let (from_at, to_at) = (from.address(), to.address());
    let copy = || {
        // SAFETY: both buffers have this length, and are kept until the stream has been waited for.
        unsafe { sys::cuMemcpyPeerAsync(to_at, there, from_at, here, bytes, stream.cu_stream()) }.result()
    };
    let took = gpu.time(&stream, times, copy)?;
    stream.synchronize()?;
    Ok(took)
}
