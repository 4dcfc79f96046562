//! Checks the ordering of events between a writing and a moving stream: with the waits no read is
//! stale, without them some are.

use cudarc::driver::result;
use kvpool_cuda::launch::{MOVING_CTAS, Work};
use kvpool_cuda::params::{CopyParams, Move, PackParams, Way};

use crate::Options;
use crate::gpu::{Gpu, Outcome, ProbeParams, launch, layer_first};
use crate::report::Section;

const PLANES: usize = 8;
const FRAMES: usize = 64;
const TILE: u32 = 16 << 10;

/// How the moves are launched: a writer is busy.
const MOVE: Work = Work::WaveBeside { ctas: MOVING_CTAS };

/// What this section launches.
pub const WORKS: &[Work] = &[MOVE, Work::Pack];

/// Writes, moves and reads, with the waits and without.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let rounds = if options.quick { 20 } else { 300 };
    let kept = stale(gpu, rounds, true)?;
    section.none(
        "moves wait for writes, reads wait for moves",
        kept,
        format_args!("of {rounds} rounds stale"),
    );
    let left = stale(gpu, rounds, false)?;
    section.check(
        "control: without the waits, reads are stale",
        left > 0,
        format!("{left} of {rounds} rounds stale"),
    );
    Ok(())
}

/// Returns the number of rounds in which the bytes read differ from those written.
fn stale(gpu: &Gpu, rounds: usize, waits: bool) -> Outcome<usize> {
    let half = FRAMES / 2;
    let ((writer, _), mover) = (gpu.stream()?, gpu.stream_for(MOVE)?);
    let arena = gpu.buffer(PLANES * FRAMES * TILE as usize)?;
    let pieces = layer_first(arena.address(), PLANES, FRAMES, TILE);
    let n_pieces = pieces.len() as u32;
    let moves: Vec<Move> = (0..half as u32).map(|src| Move { src, dst: src + half as u32 }).collect();
    let frames: Vec<u32> = moves.iter().map(|step| step.dst).collect();
    let (pieces, moves, frames) = (gpu.upload(&pieces)?, gpu.upload(&moves)?, gpu.upload(&frames)?);
    let packed = gpu.buffer(half * PLANES * TILE as usize)?;
    let copy = CopyParams::new((pieces.address(), n_pieces as usize), (moves.address(), half), 16);
    let pack = PackParams {
        pieces: pieces.address(),
        frames: frames.address(),
        packed: packed.address(),
        packed_stride: (PLANES * TILE as usize) as u64,
        n_pieces,
        n_frames: half as u32,
        unit: 16,
        way: Way::Out,
    };
    let burns = gpu.probe("kvp_probe_burn")?;
    let plane_bytes = FRAMES * TILE as usize;
    // Delays the writer for longer than the host takes to enqueue the rest, so that a missing wait has
    // an effect.
    const DELAY_MS: f64 = 0.5;
    let params = |rounds| ProbeParams::burn(packed.address(), rounds);
    // SAFETY: accesses at most the first word of the packed buffer, which is overwritten below.
    let burn = |rounds| unsafe { launch(&writer, &burns, 1, &params(rounds)) };
    let once = gpu.time(&writer, 3, || burn(1000))?;
    let delay = (DELAY_MS / once.max(1e-6) * 1000.0).clamp(1000.0, 1e5) as u32;
    let mut stale = 0;
    for round in 0..rounds {
        let byte = (round % 200) as u8;
        // The destinations hold another pattern.
        arena.fill(&writer, 0xEE)?;
        writer.synchronize()?;
        burn(delay)?;
        for plane in 0..PLANES {
            let start = arena.address() + (plane * plane_bytes) as u64;
            // SAFETY: the first half of the plane.
            unsafe { result::memset_d8_async(start, byte, plane_bytes / 2, writer.cu_stream())? };
        }
        if waits {
            mover.wait(&writer.record_event(None)?)?;
        }
        // SAFETY: all buffers are kept until both streams have been waited for. Without the waits
        // there is a race, but only on the device.
        unsafe { gpu.device.kernels().launch(mover.cu_stream(), MOVE, &copy)? };
        if waits {
            writer.wait(&mover.record_event(None)?)?;
        }
        // SAFETY: as above.
        unsafe { gpu.device.kernels().launch(writer.cu_stream(), Work::Pack, &pack)? };
        let got = packed.download(&writer)?;
        mover.synchronize()?;
        stale += usize::from(got.iter().any(|&got| got != byte));
    }
    Ok(stale)
}
