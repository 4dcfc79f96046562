//! Replays a captured graph while a pool is defragmented: each replay reads one token of every block,
//! in the frame that the block has under the replay's batch, and every byte read is verified: by a
//! kernel in the graph, on the device, and again by the host.

use std::thread;

use cudarc::driver::{DeviceRepr, result, sys};
use kvpool_cuda::params::THREADS;
use kvpool_cuda::{CudaStorage, DeviceRows};

use crate::Options;
use crate::compaction::{Scattered, Sizes, content};
use crate::gpu::{self, Gpu, Outcome, launch};
use crate::report::Section;

/// Replays beside the compaction, at least.
const REPLAYS: usize = 50;

/// CTAs of the comparison.
const CTAS: u32 = 4;

/// Bytes of a vector of the comparison.
const VECTOR: usize = 16;

/// Parameters of `kvp_probe_compare`, as in `kernels/probes.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CompareParams {
    from: u64,
    want: u64,
    vectors: u64,
    differing: u64,
}

const _: () = assert!(size_of::<CompareParams>() == 32);

// SAFETY: C layout without references, identical on the device.
unsafe impl DeviceRepr for CompareParams {}

/// Captures the loads once, and replays them until the compaction has ended.
///
/// # Errors
/// An error of the device or of the pool.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let sizes = Sizes::new(options)?;
    let scattered = Scattered::new(gpu, &sizes)?;
    let (pool, layout) = (&scattered.pool, &sizes.layout);
    let storage: &CudaStorage =
        pool.storage().and_then(|storage| storage.as_any().downcast_ref()).ok_or("a CUDA storage")?;
    let (stream, shared) = gpu.stream()?;
    let tokens = scattered.kept.len();
    let (row, block_tokens) = (layout.row_elements() * layout.dtype().bytes(), layout.block_tokens());
    let rows = gpu.buffer(2 * tokens * row)?;
    let slots_at = gpu.upload(&vec![0i64; tokens])?;
    let device_rows = DeviceRows {
        dtype: layout.dtype(),
        k: rows.address(),
        v: rows.address() + (tokens * row) as u64,
        k_stride: row,
        v_stride: row,
    };
    // K and V of a block's first token, which are the first rows of its first two planes.
    let tile = block_tokens * row;
    let mut want = Vec::new();
    for at in [0, tile] {
        for lease in &scattered.kept {
            want.extend_from_slice(&content(lease, layout.packed_bytes())[at..at + row]);
        }
    }
    if want.len() % VECTOR != 0 {
        return Err("the rows are no whole vectors".into());
    }
    let want_at = gpu.upload(&want)?;
    let counts = gpu.buffer((CTAS * THREADS) as usize * size_of::<u32>())?;
    let compare = gpu.probe("kvp_probe_compare")?;
    let vectors = want.len() / VECTOR;
    let params = CompareParams {
        from: rows.address(),
        want: want_at.address(),
        vectors: vectors as u64,
        differing: counts.address(),
    };
    let differing = || -> Outcome<usize> {
        let counts = counts.download(&stream)?;
        let count = |four: &[u8]| u32::from_ne_bytes(four.try_into().expect("four")) as usize;
        Ok(counts.chunks_exact(4).map(count).sum())
    };
    // The comparison sees other bytes: the complement of the rows.
    gpu.write(rows.address(), &want.iter().map(|byte| !byte).collect::<Vec<u8>>())?;
    counts.fill(&stream, 0)?;
    // SAFETY: the buffers are kept until the stream has been waited for.
    unsafe { launch(&stream, &compare, CTAS, &params)? };
    let seen = differing()?;
    section.check("wrong bytes are seen on the device", seen == vectors, format!("{seen} of {vectors}"));
    counts.fill(&stream, 0)?;
    stream.synchronize()?;

    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: rows and slots outlive the graph, and the slots are valid at each replay.
    let captured = unsafe { storage.load_on(&shared, 0, device_rows, slots_at.address(), tokens) };
    // SAFETY: all buffers outlive the graph.
    let compared = unsafe { launch(&stream, &compare, CTAS, &params) };
    let graph =
        stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
    captured?;
    compared?;
    let graph = graph.ok_or("the capture has no graph")?;
    let runtime = gpu::runtime()?;
    let (mut replays, mut wrong) = (0, 0);
    let moved = thread::scope(|scope| {
        let compacting = scope.spawn(|| -> Result<usize, String> {
            let runtime = gpu::runtime().map_err(|error| error.to_string())?;
            // Short waves, so that many replays fall between them.
            let options = sizes.options().wave_bytes(4 * layout.bytes_per_block());
            let report = runtime.block_on(pool.defragment_with(options));
            report.map(|report| report.moved_blocks).map_err(|error| error.to_string())
        });
        let mut replay = || -> Outcome<()> {
            while replays < REPLAYS || !compacting.is_finished() {
                let batch = pool.begin_batch_on(&shared)?;
                let slots: Vec<i64> = scattered
                    .kept
                    .iter()
                    .flat_map(|lease| lease.frames().take(1))
                    .map(|frame| (frame.index() * block_tokens) as i64)
                    .collect();
                // SAFETY: the buffer has the size of the slots; earlier replays have ended.
                unsafe { result::memcpy_htod_async(slots_at.address(), &slots, stream.cu_stream())? };
                graph.launch()?;
                let finish = batch.finish_on(&shared)?;
                gpu::wait(&runtime, finish)?;
                wrong += usize::from(rows.read()? != want);
                replays += 1;
            }
            Ok(())
        };
        let replayed = replay().map_err(|error| error.to_string());
        let moved = compacting.join().map_err(|_| "the compaction panicked".to_owned());
        replayed.and(moved.and_then(|moved| moved))
    })?;
    section.figure("replays", replays as f64, "replays");
    section.check("blocks moved beside the replays", moved > 0, format!("{moved} blocks"));
    section.none("bytes of all replays, on the device", differing()?, "vectors differ");
    section.none("bytes of all replays", wrong, format_args!("of {replays} replays differ"));
    scattered.verify(section, "after the replays")
}
