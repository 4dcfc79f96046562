//! Measures the stores of one decode step: a token of each of 256 sequences in 28 layers, enqueued
//! call by call, and replayed from a graph.

use std::time::Instant;

use cudarc::driver::sys;
use half::bf16;
use kvpool::FrameId;
use kvpool::Run;
use kvpool::storage::{Dtype, KvLayout, Storage};
use kvpool_cuda::{CudaStorage, DeviceRows};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, launch};
use crate::report::Section;

/// Baseline: a linear copy of the same bytes by one kernel.
const LINEAR: &str = "one linear copy of these bytes";

/// Measures a step.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (layout, tokens, times) = if options.quick {
        (KvLayout::named("tiny")?, 8, 3)
    } else {
        (KvLayout::named("qwen2.5-7b")?, 256, 50)
    };
    let (layers, row) = (layout.layers(), layout.row_elements());
    let storage = CudaStorage::new(&gpu.device, layout.clone(), tokens, tokens)?;
    let (stream, shared) = gpu.stream()?;
    // One slot in each frame, at another offset in each.
    let block_tokens = layout.block_tokens();
    let slots: Vec<i64> = (0..tokens).map(|at| (at * block_tokens + at * 5 % block_tokens) as i64).collect();
    // Exact in bf16, and different between tokens and halves.
    let value = |half: usize, at: usize| bf16::from_f32(((at * 3 + half * 101 + at / row * 7) % 256) as f32);
    let rows: Vec<bf16> = (0..2).flat_map(|half| (0..tokens * row).map(move |at| value(half, at))).collect();
    let (rows_at, slots_at) = (gpu.upload(&rows)?, gpu.upload(&slots)?);
    let bytes = row * size_of::<bf16>();
    let device_rows = DeviceRows {
        dtype: Dtype::Bf16,
        k: rows_at.address(),
        v: rows_at.address() + (tokens * bytes) as u64,
        k_stride: bytes,
        v_stride: bytes,
    };
    let all = [Run { start: FrameId(0), len: tokens as u32 }];
    let step = || -> Outcome<()> {
        for layer in 0..layers {
            // SAFETY: rows and slots are kept until the stream has been waited for; slots are
            // distinct, and no one else uses the storage.
            unsafe { storage.store_on(&shared, layer, device_rows, slots_at.address(), tokens)? };
        }
        Ok(())
    };
    let moved = 2 * 2 * layers * tokens * bytes;
    let (from, to) = (gpu.buffer(moved / 2)?, gpu.buffer(moved / 2)?);
    let probe = gpu.probe("kvp_probe_copy")?;
    let linear = ProbeParams {
        from: from.address(),
        to: to.address(),
        vectors: moved as u64 / 32,
        rounds: 1,
        reserved: 0,
    };
    let base = gpu.time(&stream, times, || {
        // SAFETY: both buffers have this length.
        unsafe { launch(&stream, &probe, 8 * gpu.multiprocessors, &linear) }
    })?;
    section.figure(LINEAR, base * 1e3, "us");

    let check = |section: &mut Section, what: &str| -> Outcome<()> {
        stream.synchronize()?;
        let mut packed = vec![0; tokens * layout.packed_bytes()];
        // SAFETY: no one else uses the storage.
        unsafe { storage.pack(&all, &mut packed)? };
        let wrong = wrong_rows(&layout, &packed, &slots, &rows);
        section.check(
            format!("{what}: the rows are in their slots"),
            wrong == 0,
            format!("{wrong} rows differ"),
        );
        // SAFETY: as above.
        unsafe { storage.zero(&all)? };
        Ok(())
    };
    let took = gpu.time(&stream, times, &step)?;
    let what = format!("{tokens} tokens in {layers} layers, one call a layer");
    section.ratio(what, took * 1e3, "us", took / base, LINEAR);
    check(section, "calls")?;
    let begin = Instant::now();
    step()?;
    section.figure("host's time to enqueue them", begin.elapsed().as_secs_f64() * 1e6, "us");
    stream.synchronize()?;
    // SAFETY: no one else uses the storage.
    unsafe { storage.zero(&all)? };

    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = step();
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    captured?;
    let graph = graph.ok_or("the capture has no graph")?;
    let took = gpu.time(&stream, times, || Ok(graph.launch()?))?;
    section.ratio("the same, replayed from a graph", took * 1e3, "us", took / base, LINEAR);
    check(section, "graph")?;
    storage.close()?;
    Ok(())
}

/// Returns the number of rows of packed frames that differ from those stored.
fn wrong_rows(layout: &KvLayout, packed: &[u8], slots: &[i64], rows: &[bf16]) -> usize {
    let (block_tokens, row) = (layout.block_tokens(), layout.row_elements());
    let row_bytes = row * size_of::<bf16>();
    let tile = block_tokens * row_bytes;
    let mut wrong = 0;
    for (token, &slot) in slots.iter().enumerate() {
        let (frame, offset) = (slot as usize / block_tokens, slot as usize % block_tokens);
        for plane in 0..2 * layout.layers() {
            let at = frame * layout.packed_bytes() + plane * tile + offset * row_bytes;
            let want = &rows[(plane % 2 * slots.len() + token) * row..][..row];
            let got =
                packed[at..at + row_bytes].chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]));
            wrong += usize::from(!got.eq(want.iter().copied()));
        }
    }
    wrong
}
