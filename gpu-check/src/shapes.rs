//! Measures the copy kernels by the shape of their launch: CTAs, threads, and bytes in flight; and
//! the driver's copies of the same pieces.

use cudarc::driver::{result, sys};
use kvpool_cuda::launch::{Kernel, MOVING_CTAS, Params, Shape, Work};
use kvpool_cuda::params::{BULK_SHARED_BYTES, BULK_THREADS, COPY_TEAM, CopyParams, Move, PIECE_BYTES_MAX};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, distinct, layer_first, rate};
use crate::report::Section;
use crate::sample;

/// Baseline: a linear copy by the probe kernel, bytes read and written.
const LINEAR: &str = "linear copy, 8 CTAs a multiprocessor";

/// Bytes that a ring of `kvp_copy_bulk` has in flight: three of its four stages.
const BULK_IN_FLIGHT: u32 = 3 * PIECE_BYTES_MAX;

/// What this section launches, among other shapes.
pub const WORKS: &[Work] = &[Work::Wave, Work::WaveBeside { ctas: MOVING_CTAS }];

/// Measures 256 moves of blocks of 896 KiB.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (planes, frames, moved, times) = if options.quick { (4, 32, 8, 2) } else { (56, 600, 256, 7) };
    let tile = PIECE_BYTES_MAX;
    let (stream, _) = gpu.stream()?;
    let arena = gpu.buffer(planes * frames * tile as usize)?;
    let pieces = layer_first(arena.address(), planes, frames, tile);
    let table = gpu.upload(&pieces)?;
    let mut params = CopyParams::new((table.address(), pieces.len()), (0, moved), 16);
    // From even frames of the first half to scattered frames of the second.
    let half = frames / 2;
    for at in 0..moved {
        let dst = half + (at * 7) % half;
        params.few[at] = Move { src: at as u32, dst: dst as u32 };
    }
    distinct(&params.few[..moved])?;
    let bytes = 2 * moved * planes * tile as usize;
    let rate = |milliseconds| rate(bytes, milliseconds);
    let (from, to) = (arena.address(), arena.address() + (planes * half) as u64 * u64::from(tile));
    let sms = gpu.multiprocessors;
    // SAFETY: the two halves of the arena.
    let linear = unsafe { gpu.time_copy(&stream, times, 8, &ProbeParams::copy(from, to, bytes / 2))? };
    section.figure(LINEAR, rate(linear), "GB/s");
    let mut shapes = Vec::new();
    let teams_of = |ctas, teams| {
        let shape = Shape { ctas, threads: teams * COPY_TEAM, shared_bytes: 0 };
        (Kernel::Copy, shape, teams * PIECE_BYTES_MAX)
    };
    for share in [1, 2, 4] {
        shapes.extend([1, 2, 4, 8].map(|teams| teams_of(share * sms, teams)));
    }
    for teams in [2, 8] {
        shapes.extend([8, 16, 32, 64].map(|ctas| teams_of(ctas, teams)));
    }
    if gpu.device.kernels().has_bulk {
        for ctas in [8, 16, 32, 64, sms, 2 * sms, 3 * sms] {
            let shape = Shape { ctas, threads: BULK_THREADS, shared_bytes: BULK_SHARED_BYTES };
            shapes.push((Kernel::CopyBulk, shape, BULK_IN_FLIGHT));
        }
    }
    let own = WORKS.iter().map(|work| gpu.device.kernels().rule(*work));
    let own: Vec<_> = own.map(|rule| (rule.kernel, rule.shape(params.jobs(), sms))).collect();
    // Some tiles of the first, a middle and the last plane.
    let planted = || {
        let steps = params.few[..moved].iter().step_by(moved.div_ceil(8));
        let place = |plane: usize, frame: u32| {
            arena.address() + ((plane * frames + frame as usize) * tile as usize) as u64
        };
        let places = steps.flat_map(|step| {
            [0, planes / 2, planes - 1].map(|plane| (place(plane, step.src), place(plane, step.dst)))
        });
        sample::plant(gpu, tile as usize, places)
    };
    let mut wrong = Vec::new();
    let mut verify = |what: String, samples: &[sample::Sample]| -> Outcome<()> {
        let missing = sample::missing(gpu, &stream, samples)?;
        wrong.extend((missing > 0).then(|| format!("{what}: {missing} of {} tiles", samples.len())));
        Ok(())
    };
    for (name, shape, flight) in shapes {
        let Shape { ctas, threads, .. } = shape;
        let samples = planted()?;
        let time = gpu.time(&stream, times, || {
            // SAFETY: the table and the arena are kept until the stream has been waited for.
            unsafe { gpu.device.kernels().launch_as(stream.cu_stream(), name, shape, &params) }
        })?;
        let kib = u64::from(ctas) * u64::from(flight) / 1024;
        let as_pools = if own.contains(&(name, shape)) { ", as pools do" } else { "" };
        let what = format!("{name}, {ctas} CTAs of {threads} threads, {kib} KiB in flight{as_pools}");
        section.ratio(what.clone(), rate(time), "GB/s", linear / time, LINEAR);
        verify(what, &samples)?;
    }
    // The copy engines: a call a piece, and one call for all.
    let (mut to, mut from) = (Vec::new(), Vec::new());
    for step in &params.few[..moved] {
        for piece in &pieces {
            let at = |frame: u32| piece.base + u64::from(frame) * piece.frame_stride;
            to.push(at(step.dst));
            from.push(at(step.src));
        }
    }
    let count = to.len();
    let mut measure = |name: &str, way: &mut dyn FnMut() -> Outcome<()>| -> Outcome<()> {
        let samples = planted()?;
        let time = gpu.time(&stream, times.min(3), way)?;
        let what = format!("{name}, {count} pieces of {} KiB", tile / 1024);
        section.ratio(what.clone(), rate(time), "GB/s", linear / time, LINEAR);
        verify(what, &samples)
    };
    measure("cuMemcpyDtoDAsync", &mut || {
        for (&to, &from) in to.iter().zip(&from) {
            // SAFETY: pieces of the arena, which do not overlap.
            unsafe { result::memcpy_dtod_async(to, from, tile as usize, stream.cu_stream())? };
        }
        Ok(())
    })?;
    if has("cuMemcpyBatchAsync") {
        let mut sizes = vec![tile as usize; count];
        let place = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.ordinal.into(),
        };
        let order = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut attributes =
            sys::CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: place, dstLocHint: place, flags: 0 };
        measure("cuMemcpyBatchAsync", &mut || {
            let (mut first, mut failed) = (0, usize::MAX);
            let (to, from, sizes) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr());
            let (attributes, stream) = (&mut attributes, stream.cu_stream());
            // SAFETY: as above; all lists have `count` entries, and the pointers are valid.
            let enqueued = unsafe {
                sys::cuMemcpyBatchAsync(
                    to,
                    from,
                    sizes,
                    count,
                    attributes,
                    &mut first,
                    1,
                    &mut failed,
                    stream,
                )
            };
            Ok(enqueued.result()?)
        })?;
    } else {
        section.check("cuMemcpyBatchAsync", true, "not measured: the driver has no such function");
    }
    section.check("tiles moved by every way", wrong.is_empty(), wrong.join("; "));
    Ok(())
}

/// Returns true if the driver has a function that older ones lack.
fn has(name: &str) -> bool {
    // SAFETY: the driver is loaded, and the symbol is looked up and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok() }
}
