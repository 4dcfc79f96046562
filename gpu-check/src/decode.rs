//! Measures the stores of one decode step: a token of each of 256 sequences in 28 layers, enqueued
//! call by call, and replayed from a graph.

use cudarc::driver::sys;
use half::bf16;
use kvpool::storage::{Dtype, Elements, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::{CudaStorage, DeviceRows};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, took};
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
    let linear = ProbeParams::copy(from.address(), to.address(), moved / 2);
    // SAFETY: both buffers have this length.
    let base = unsafe { gpu.time_copy(&stream, times, 8, &linear)? };
    section.figure(LINEAR, base * 1e3, "us");

    let host = HostStorage::new(layout.clone(), tokens, tokens)?;
    let (k, v) = rows.split_at(tokens * row);
    let mut want = vec![0; tokens * layout.packed_bytes()];
    // SAFETY: no one else uses the storage.
    unsafe {
        (0..layers).try_for_each(|layer| host.store(layer, Elements::from(k), Elements::from(v), &slots))?;
        host.pack(&all, &mut want)?;
    }
    let check = |section: &mut Section, what: &str| -> Outcome<()> {
        stream.synchronize()?;
        let mut packed = vec![0; tokens * layout.packed_bytes()];
        // SAFETY: no one else uses the storage.
        unsafe { storage.pack(&all, &mut packed)? };
        let [got, want] = [&packed, &want].map(|packed| packed.chunks(layout.packed_bytes()));
        let wrong = got.zip(want).filter(|(got, want)| got != want).count();
        section.none(format!("{what}: the rows are in their slots"), wrong, "frames differ from the host's");
        // SAFETY: as above.
        unsafe { storage.zero(&all)? };
        Ok(())
    };
    let calls = gpu.time(&stream, times, &step)?;
    let what = format!("{tokens} tokens in {layers} layers, one call a layer");
    section.ratio(what, calls * 1e3, "us", calls / base, LINEAR);
    check(section, "calls")?;
    section.figure("host's time to enqueue them", took(step)?.as_secs_f64() * 1e6, "us");
    stream.synchronize()?;
    // SAFETY: no one else uses the storage.
    unsafe { storage.zero(&all)? };

    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = step();
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    captured?;
    let graph = graph.ok_or("the capture has no graph")?;
    let replayed = gpu.time(&stream, times, || graph.launch())?;
    section.ratio("the same, replayed from a graph", replayed * 1e3, "us", replayed / base, LINEAR);
    check(section, "graph")?;
    storage.close()?;
    Ok(())
}
