//! Measures how much a wave of moves slows down a kernel of the model beside it, by the number of
//! CTAs of the wave.
//!
//! One step of a model stands for the memory-bound kernel: it reads as many bytes as Qwen2.5-7B has
//! weights. One wave of 64 blocks runs beside each step, on the stream of the lowest priority,
//! which is also the default priority. The step therefore runs on a default stream, and on one of
//! the highest priority. Both are timed alone and together. So are a step whose weights stay in the
//! cache, a compute-bound one, and one that leaves little room on each multiprocessor.

use cudarc::driver::sys;
use kvpool_cuda::StreamPriority;
use kvpool_cuda::launch::{MOVING_CTAS, Work};
use kvpool_cuda::params::{CopyParams, Move, THREADS};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, TIMED, launch_as, layer_first, median};
use crate::report::Section;
use crate::sample;

/// Shared memory of a CTA of the persistent kernel: most of what a multiprocessor has.
const SHARED_MAX: u32 = 200 << 10;

/// Bytes that a step reads again and again: half of an H200's L2 cache.
const CACHED_BYTES: usize = 24 << 20;

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
    let list: Vec<Move> = (0..moved as u32)
        .map(|at| Move { src: 2 * at, dst: frames as u32 / 2 + 2 * at + 1 })
        .filter(|step| (step.dst as usize) < frames)
        .collect();
    let (n_pieces, n_moves) = (pieces.len(), list.len());
    let (pieces, moves) = (gpu.upload(&pieces)?, gpu.upload(&list)?);
    let wave = CopyParams::new((pieces.address(), n_pieces), (moves.address(), n_moves), 16);
    let low = gpu.stream_for(MOVE)?;

    let read_bytes = if options.quick { 1 << 20 } else { 4usize << 30 };
    let rounds = if options.quick { 1 } else { 4 };
    let weights = gpu.buffer(read_bytes)?;
    weights.fill(&main, 2)?;
    let result = gpu.buffer(16)?;
    let probe_of = |bytes: usize, rounds| ProbeParams {
        from: weights.address(),
        to: result.address(),
        vectors: bytes as u64 / 16,
        rounds,
        reserved: 0,
    };
    let probe = |rounds| probe_of(read_bytes, rounds);
    // Weights that fit into the cache of all multiprocessors, read as often.
    let cached = read_bytes.min(CACHED_BYTES);
    let in_cache = probe_of(cached, rounds * (read_bytes / cached) as u32);
    let burns = if options.quick { 100 } else { 400_000 };
    let sms = gpu.multiprocessors;
    main.synchronize()?;
    let [usual, high] = [main, gpu.stream_of(StreamPriority::Highest)?];
    // A persistent kernel, as attention planners launch: one CTA on each multiprocessor with most
    // of its shared memory, for the whole step. A wave finds little room beside it.
    let opt_in = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let shared = gpu.attribute(opt_in)?.saturating_sub(1024).min(SHARED_MAX);
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let [reads, burn] = ["kvp_probe_read", "kvp_probe_burn"].map(|name| gpu.probe(name));
    let (reads, burn) = (reads?, burn?);
    burn.set_attribute(which, shared as i32)?;
    // Only some of the moves' tiles: the bytes must arrive beside the steps, too.
    let tiles = list.iter().flat_map(|step| {
        let at = |frame: u32| arena.address() + u64::from(frame) * u64::from(tile);
        [(at(step.src), at(step.dst))]
    });
    let samples = sample::plant(gpu, tile as usize, tiles)?;
    let wide = (8 * sms, THREADS, 0);
    // SAFETY: pieces, moves and arena are kept until both streams have been waited for.
    let launch_wave =
        |ctas| unsafe { gpu.device.kernels().launch(low.cu_stream(), Work::WaveBeside { ctas }, &wave) };
    for (name, main, kernel, params, grid) in [
        ("memory-bound", &usual, &reads, probe(rounds), wide),
        ("cached", &usual, &reads, in_cache, wide),
        ("compute-bound", &usual, &burn, probe(burns), wide),
        ("high-priority memory-bound", &high, &reads, probe(rounds), wide),
        ("high-priority compute-bound", &high, &burn, probe(burns), wide),
        ("persistent", &usual, &burn, probe(burns), (sms, THREADS, shared)),
    ] {
        // Returns the times of the step and of the wave. The wave is enqueued first, except behind
        // a persistent step, which it must not delay.
        let time = |beside: Option<u32>| -> Outcome<(f64, f64)> {
            let (mut steps_took, mut waves_took) = (Vec::new(), Vec::new());
            for _ in 0..steps {
                let begin = main.record_event(TIMED)?;
                // SAFETY: reads the weights, and writes at most the result.
                let step = || unsafe { launch_as(main, kernel, grid, &params) };
                let is_first = grid != wide;
                if is_first {
                    step()?;
                }
                if let Some(ctas) = beside {
                    // The wave may begin together with the step, and not before.
                    low.wait(&begin)?;
                    let start = low.record_event(TIMED)?;
                    launch_wave(ctas)?;
                    let done = low.record_event(TIMED)?;
                    waves_took.push((start, done));
                }
                if !is_first {
                    step()?;
                }
                let end = main.record_event(TIMED)?;
                steps_took.push(f64::from(begin.elapsed_ms(&end)?));
                low.synchronize()?;
            }
            let waves = waves_took.iter().map(|(start, done)| Ok(f64::from(start.elapsed_ms(done)?)));
            Ok((median(steps_took), median(waves.collect::<Outcome<_>>()?)))
        };
        time(None)?;
        let (alone, _) = time(None)?;
        section.figure(format!("{name} step alone"), alone, "ms");
        for ctas in [8, 16, MOVING_CTAS, 64, sms] {
            let (together, took) = time(Some(ctas))?;
            let what = format!("{name} step beside {n_moves} blocks on {ctas} CTAs");
            section.ratio(what, together, "ms", together / alone, "the step alone");
            if grid != wide {
                let lonely = gpu.time(&low, steps, || launch_wave(ctas))?;
                let what = format!("those blocks on {ctas} CTAs beside the {name} step");
                section.ratio(what, took, "ms", took / lonely, "the wave alone");
            }
        }
        // The drift of the device itself, as a scale for the other ratios.
        let (again, _) = time(None)?;
        section.ratio(format!("{name} step alone, again"), again, "ms", again / alone, "the step alone");
    }
    sample::check(gpu, &low, section, "bytes moved beside the steps", &samples)?;
    usual.synchronize()?;
    high.synchronize()?;
    Ok(())
}
