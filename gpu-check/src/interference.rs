//! Measures how much a wave of moves slows down a kernel of the model beside it, by the number of
//! CTAs of the wave.
//!
//! One step of a model stands for the memory-bound kernel: it reads as many bytes as Qwen2.5-7B has
//! weights. One wave of 64 blocks runs beside each step, on the stream of the lowest priority,
//! which is also the default priority. The step therefore runs on a default stream, and on one of
//! the highest priority. Both are timed alone and together.

use cudarc::driver::sys;
use kvpool_cuda::launch::{Kernel, MOVING_CTAS, Params, Shape, Work};
use kvpool_cuda::params::{BULK_SHARED_BYTES, BULK_THREADS, COPY_TEAM, CopyParams, Move, THREADS};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, launch, launch_as, layer_first, median};
use crate::report::Section;
use crate::sample;

/// Shared memory of a CTA of the persistent kernel: most of what a multiprocessor has.
const SHARED_MAX: u32 = 200 << 10;

/// How the waves are launched; the number of CTAs varies.
const MOVE: Work = Work::WaveBeside { ctas: MOVING_CTAS };

/// What this section launches, beside other shapes.
pub const WORKS: &[Work] = &[MOVE];

/// Number of steps for the median.
const STEPS: usize = 20;

/// Measures a memory-bound and a compute-bound kernel beside waves.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (planes, tile, frames, moved) = (56, 16 << 10, 256, 64);
    let (planes, frames, moved) = if options.quick { (4, 16, 4) } else { (planes, frames, moved) };
    let steps = if options.quick { 3 } else { STEPS };
    let arena = gpu.buffer(planes * frames * tile as usize)?;
    let (main, _) = gpu.stream()?;
    arena.fill(&main, 1)?;
    main.synchronize()?;
    let pieces = layer_first(arena.address(), planes, frames, tile);
    let moves: Vec<Move> = (0..moved)
        .map(|at| Move { src: 2 * at as u32, dst: (frames / 2) as u32 + 2 * at as u32 + 1 })
        .collect();
    let moves: Vec<Move> = moves.into_iter().filter(|step| (step.dst as usize) < frames).collect();
    let (n_pieces, n_moves) = (pieces.len(), moves.len());
    let list = moves;
    let (pieces, moves) = (gpu.upload(&pieces)?, gpu.upload(&list)?);
    let wave = CopyParams::new((pieces.address(), n_pieces), (moves.address(), n_moves), 16);
    let low = gpu.stream_for(MOVE)?;

    let read_bytes = if options.quick { 1 << 20 } else { 4usize << 30 };
    let rounds = if options.quick { 1 } else { 4 };
    let weights = gpu.buffer(read_bytes)?;
    weights.fill(&main, 2)?;
    let result = gpu.buffer(16)?;
    let probe = |rounds| ProbeParams {
        from: weights.address(),
        to: result.address(),
        vectors: read_bytes as u64 / 16,
        rounds,
        reserved: 0,
    };
    let burns = if options.quick { 100 } else { 400_000 };
    let sms = gpu.multiprocessors;
    main.synchronize()?;
    let [usual, high] = [main, gpu.highest()?];
    for (name, main, kernel, params, grid) in [
        ("memory-bound", &usual, "kvp_probe_read", probe(rounds), 8 * sms),
        ("compute-bound", &usual, "kvp_probe_burn", probe(burns), 8 * sms),
        ("high-priority memory-bound", &high, "kvp_probe_read", probe(rounds), 8 * sms),
        ("high-priority compute-bound", &high, "kvp_probe_burn", probe(burns), 8 * sms),
    ] {
        let kernel = gpu.probe(kernel)?;
        let time = |beside: Option<u32>| -> Outcome<f64> {
            let mut took = Vec::with_capacity(steps);
            for _ in 0..steps {
                let begin = main.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
                if let Some(ctas) = beside {
                    // The wave may begin together with the step, and not before.
                    low.wait(&begin)?;
                    // SAFETY: pieces, moves and arena are kept until both streams have been waited
                    // for.
                    unsafe { gpu.launch(&low, Work::WaveBeside { ctas }, &wave)? };
                }
                // SAFETY: reads the weights, and writes at most the result.
                unsafe { launch(main, &kernel, grid, &params)? };
                let end = main.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
                took.push(f64::from(begin.elapsed_ms(&end)?));
                low.synchronize()?;
            }
            Ok(median(took))
        };
        time(None)?;
        let alone = time(None)?;
        section.figure(format!("{name} step alone"), alone, "ms");
        for ctas in [8, 16, MOVING_CTAS, 64, sms] {
            let together = time(Some(ctas))?;
            let what = format!("{name} step beside {n_moves} blocks on {ctas} CTAs");
            section.ratio(what, together, "ms", together / alone, "the step alone");
        }
        // The drift of the device itself, as a scale for the other ratios.
        let again = time(None)?;
        section.ratio(format!("{name} step alone, again"), again, "ms", again / alone, "the step alone");
    }
    usual.synchronize()?;
    high.synchronize()?;
    // A persistent kernel, as attention planners launch: one CTA on each multiprocessor with most of its
    // shared memory, for the whole step. A wave finds little room beside it.
    let kernel = gpu.probe("kvp_probe_burn")?;
    let opt_in = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let shared = (gpu.context.attribute(opt_in)?.max(0) as u32).saturating_sub(1024).min(SHARED_MAX);
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    kernel.set_attribute(which, shared as i32)?;
    // Only some of the moves' tiles: the bytes must arrive beside it, too.
    let tiles = list.iter().flat_map(|step| {
        let at = |frame: u32| arena.address() + u64::from(frame) * u64::from(tile);
        [(at(step.src), at(step.dst))]
    });
    let samples = sample::plant(gpu, tile as usize, tiles)?;
    let time = |beside: Option<(Kernel, Shape)>| -> Outcome<(f64, f64)> {
        let (mut steps_took, mut waves_took) = (Vec::new(), Vec::new());
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        for _ in 0..steps {
            let begin = usual.record_event(timed)?;
            // SAFETY: writes at most the result.
            unsafe { launch_as(&usual, &kernel, (sms, THREADS, shared), &probe(burns))? };
            let end = usual.record_event(timed)?;
            if let Some((copy, shape)) = beside {
                low.wait(&begin)?;
                let start = low.record_event(timed)?;
                // SAFETY: pieces, moves and arena are kept until both streams have been waited for.
                unsafe { gpu.launch_as(&low, copy, shape, &wave)? };
                let done = low.record_event(timed)?;
                waves_took.push(f64::from(start.elapsed_ms(&done)?));
            }
            steps_took.push(f64::from(begin.elapsed_ms(&end)?));
            low.synchronize()?;
        }
        Ok((median(steps_took), median(waves_took)))
    };
    time(None)?;
    let (alone, _) = time(None)?;
    section.figure(
        format!("persistent step alone, {} KiB of shared memory a CTA", shared / 1024),
        alone,
        "ms",
    );
    let own = MOVE.rule(gpu.device.has_bulk());
    let mut shapes =
        vec![(Kernel::Copy, Shape { ctas: MOVING_CTAS, threads: 2 * COPY_TEAM, shared_bytes: 0 })];
    if gpu.device.has_bulk() {
        let (ctas, threads, shared_bytes) = (MOVING_CTAS, BULK_THREADS, BULK_SHARED_BYTES);
        shapes.push((Kernel::CopyBulk, Shape { ctas, threads, shared_bytes }));
    }
    for (copy, shape) in shapes {
        let name = if own.shape(wave.jobs(), sms) == shape && own.kernel == copy {
            format!("{copy}, as pools do")
        } else {
            copy.to_string()
        };
        let lonely = gpu.time(&low, steps, || {
            // SAFETY: as above.
            unsafe { gpu.launch_as(&low, copy, shape, &wave) }
        })?;
        let (step, took) = time(Some((copy, shape)))?;
        let what = format!("persistent step beside {n_moves} blocks by {name}");
        section.ratio(what, step, "ms", step / alone, "the step alone");
        let what = format!("those blocks by {name} beside the persistent step");
        section.ratio(what, took, "ms", took / lonely, "the wave alone");
    }
    low.synchronize()?;
    let missing = sample::missing(gpu, &samples)?;
    section.check("bytes moved beside the steps", missing == 0, format!("{missing} tiles differ"));
    usual.synchronize()?;
    Ok(())
}
