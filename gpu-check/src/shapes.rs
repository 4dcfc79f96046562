//! Measures the copy kernels by the shape of their launch: CTAs, threads, and bytes in flight; and the
//! driver's copies of the same pieces.

use cudarc::driver::{result, sys};
use kvpool_cuda::launch::{Kernel, MOVING_CTAS, Params, Shape, Work};
use kvpool_cuda::params::{BULK_SHARED_BYTES, BULK_THREADS, COPY_TEAM, CopyParams, Move, PIECE_BYTES_MAX};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, launch, layer_first};
use crate::report::Section;
use crate::sample;

/// Baseline: a linear copy by the probe kernel, bytes read and written.
const LINEAR: &str = "linear copy, 8 CTAs a multiprocessor";

/// Bytes that a ring of `kvp_copy_bulk` has in flight: three of its four stages.
const BULK_IN_FLIGHT: u32 = 3 * PIECE_BYTES_MAX;

/// What this section launches, among other shapes.
pub const WORKS: &[Work] = &[Work::Wave, Work::WaveBeside { ctas: MOVING_CTAS }];

/// Enqueues all copies in one way.
type Way<'a> = Box<dyn FnMut() -> Outcome<()> + 'a>;

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
    let distinct: std::collections::HashSet<u32> = params.few[..moved].iter().map(|step| step.dst).collect();
    if distinct.len() != moved {
        return Err("the moves have a destination twice".into());
    }
    let bytes = 2 * moved * planes * tile as usize;
    let rate = |milliseconds: f64| bytes as f64 / 1e6 / milliseconds;
    let probe = gpu.probe("kvp_probe_copy")?;
    let (from, to) = (arena.address(), arena.address() + (planes * half) as u64 * u64::from(tile));
    let vectors = bytes as u64 / 32;
    let linear_params = ProbeParams { from, to, vectors, rounds: 1, reserved: 0 };
    let sms = gpu.multiprocessors;
    let linear = gpu.time(&stream, times, || {
        // SAFETY: the two halves of the arena.
        unsafe { launch(&stream, &probe, 8 * sms, &linear_params) }
    })?;
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
    if gpu.device.has_bulk() {
        for ctas in [8, 16, 32, 64, sms, 2 * sms, 3 * sms] {
            let shape = Shape { ctas, threads: BULK_THREADS, shared_bytes: BULK_SHARED_BYTES };
            shapes.push((Kernel::CopyBulk, shape, BULK_IN_FLIGHT));
        }
    }
    let own = WORKS.iter().map(|work| work.rule(gpu.device.has_bulk()));
    let own: Vec<_> = own.map(|rule| (rule.kernel, rule.shape(params.jobs(), sms))).collect();
    // Of each kernel, all bytes are verified once, and samples for each shape: the host takes longer to
    // make and compare half a gigabyte than the device to copy it.
    let whole = pattern(planes * frames * tile as usize);
    let places = || {
        let steps = params.few[..moved].iter().step_by(moved.div_ceil(8));
        let place = |plane: usize, frame: u32| {
            arena.address() + ((plane * frames + frame as usize) * tile as usize) as u64
        };
        steps.flat_map(move |step| {
            [0, planes / 2, planes - 1].map(|plane| (place(plane, step.src), place(plane, step.dst)))
        })
    };
    let mut verified = Vec::new();
    for (name, shape, flight) in shapes {
        let Shape { ctas, threads, .. } = shape;
        let is_first = !verified.contains(&name);
        verified.push(name);
        if is_first {
            gpu.write(arena.address(), &whole)?;
        }
        let samples = if is_first { Vec::new() } else { sample::plant(gpu, tile as usize, places())? };
        let time = gpu.time(&stream, times, || {
            // SAFETY: the table and the arena are kept until the stream has been waited for.
            unsafe { gpu.launch_as(&stream, name, shape, &params) }
        })?;
        let kib = u64::from(ctas) * u64::from(flight) / 1024;
        let as_pools = if own.contains(&(name, shape)) { ", as pools do" } else { "" };
        let what = format!("{name}, {ctas} CTAs of {threads} threads, {kib} KiB in flight{as_pools}");
        section.ratio(what.clone(), rate(time), "GB/s", linear / time, LINEAR);
        stream.synchronize()?;
        if is_first {
            let is_right = is_moved(&arena.read()?, &whole, &params, planes, frames);
            section.check(
                format!("all bytes moved by {name}"),
                is_right,
                format!("{} MiB", whole.len() >> 20),
            );
        }
        let missing = sample::missing(gpu, &samples)?;
        if missing > 0 {
            section.check(what, false, format!("{missing} of {} tiles are wrong", samples.len()));
        }
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
    let mut ways: Vec<(&str, Way<'_>)> = vec![(
        "cuMemcpyDtoDAsync",
        Box::new(|| {
            for (&to, &from) in to.iter().zip(&from) {
                // SAFETY: pieces of the arena, which do not overlap.
                unsafe { result::memcpy_dtod_async(to, from, tile as usize, stream.cu_stream())? };
            }
            Ok(())
        }),
    )];
    if has("cuMemcpyBatchAsync") {
        let (mut to, mut from) = (to.clone(), from.clone());
        let (mut sizes, stream) = (vec![tile as usize; count], &stream);
        let place = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.ordinal(),
        };
        let order = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut attributes =
            sys::CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: place, dstLocHint: place, flags: 0 };
        ways.push((
            "cuMemcpyBatchAsync",
            Box::new(move || {
                let (mut first, mut failed) = (0, usize::MAX);
                // SAFETY: as above; all lists have `count` entries, and the pointers are valid.
                let enqueued = unsafe {
                    sys::cuMemcpyBatchAsync(
                        to.as_mut_ptr(),
                        from.as_mut_ptr(),
                        sizes.as_mut_ptr(),
                        count,
                        &mut attributes,
                        &mut first,
                        1,
                        &mut failed,
                        stream.cu_stream(),
                    )
                };
                Ok(enqueued.result()?)
            }),
        ));
    } else {
        section.check("cuMemcpyBatchAsync", true, "not measured: the driver has no such function");
    }
    for (name, mut way) in ways {
        gpu.write(arena.address(), &whole)?;
        let time = gpu.time(&stream, times.min(3), &mut *way)?;
        let what = format!("{name}, {count} pieces of {} KiB", tile / 1024);
        section.ratio(what.clone(), rate(time), "GB/s", linear / time, LINEAR);
        let is_right = is_moved(&arena.download(&stream)?, &whole, &params, planes, frames);
        section.check(format!("all bytes moved by {name}"), is_right, what);
    }
    Ok(())
}

/// Returns true if the driver has a function that older ones lack.
fn has(name: &str) -> bool {
    // SAFETY: the driver is loaded, and the symbol is looked up and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok() }
}

/// Returns bytes that differ between frames and planes.
fn pattern(bytes: usize) -> Vec<u8> {
    let mut words = vec![0; bytes];
    for (at, word) in words.chunks_exact_mut(8).enumerate() {
        let value = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    words
}

/// Returns true if the moves were carried out, and no other byte has changed.
fn is_moved(now: &[u8], before: &[u8], params: &CopyParams, planes: usize, frames: usize) -> bool {
    let tile = PIECE_BYTES_MAX as usize;
    let mut want = before.to_vec();
    for plane in 0..planes {
        for step in &params.few[..params.n_moves as usize] {
            let at = |frame: u32| (plane * frames + frame as usize) * tile;
            let (from, to) = (at(step.src), at(step.dst));
            want[to..to + tile].copy_from_slice(&before[from..from + tile]);
        }
    }
    now == want
}
