//! Measures how long memory takes to be mapped and unmapped, by the size of the step.

use std::time::{Duration, Instant};

use kvpool::cuda::{CudaConfig, CudaStorage};
use kvpool::storage::{Arrangement, Dtype, KvLayout, Storage};

use crate::Options;
use crate::gpu::{Gpu, Outcome};
use crate::report::Section;

/// Frames have 2 MiB, so that a step of `n` frames maps `2 * n` MiB.
const FRAME_BYTES: usize = 2 << 20;

/// Grows and shrinks storages whose frames are mapped in steps of several sizes.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (times, sizes): (usize, &[usize]) =
        if options.quick { (2, &[1, 2]) } else { (15, &[1, 4, 16, 64, 256]) };
    // K and V of one layer, next to each other in a block.
    let layout = KvLayout::builder().layers(1).kv_heads(8).head_dim(1024).block_tokens(64).dtype(Dtype::Bf16);
    let layout = layout.arrangement(Arrangement::BlockFirst).build()?;
    if layout.packed_bytes() != FRAME_BYTES {
        return Err(format!("a frame has {} bytes", layout.packed_bytes()).into());
    }
    for &frames in sizes {
        let config = CudaConfig::default().segment_frames(frames);
        let storage = CudaStorage::with_config(&gpu.device, layout.clone(), frames, 2 * frames, config)?;
        let small = storage.mapped_bytes();
        let (mut grown, mut shrunk) = (Vec::new(), Vec::new());
        let mut exact = true;
        for _ in 0..times {
            let begin = Instant::now();
            storage.grow(2 * frames)?;
            grown.push(begin.elapsed());
            exact &= storage.mapped_bytes() == 2 * small;
            let begin = Instant::now();
            // SAFETY: no one else uses the storage.
            unsafe { storage.shrink(frames) };
            shrunk.push(begin.elapsed());
            exact &= storage.mapped_bytes() == small;
        }
        let mib = (frames * FRAME_BYTES) >> 20;
        section.check(format!("{mib} MiB mapped and unmapped"), exact, format!("{small} bytes at the end"));
        let per_gib = |times: &[Duration]| median(times) * 1e3 * 1024.0 / mib as f64;
        section.figure(format!("{mib} MiB mapped and zeroed in one step"), median(&grown) * 1e6, "us");
        section.figure(format!("{mib} MiB unmapped in one step"), median(&shrunk) * 1e6, "us");
        section.figure("1 GiB in such steps, mapped and zeroed", per_gib(&grown), "ms");
        storage.close()?;
    }
    Ok(())
}

/// Returns the median in seconds.
fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64)
}
