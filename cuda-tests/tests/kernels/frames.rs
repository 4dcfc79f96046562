//! Whole frames: copy, zero, pack, unpack.

use kvpool::storage::{FrameMove, KvLayout};
use kvpool::{FrameId, Run};
use kvpool_cuda::params::{
    BULK_THREADS, COPY_TEAM, CopyParams, MOVES_INLINE, Move, PackParams, Piece, Way, ZeroParams, unit,
};
use kvpool_cuda_tests::host::{Order, launch, launch_with};
use kvpool_testkit::rng::Rng;

use crate::arena::{Arena, FRAMES, unit_of};
use crate::buffer::{Buffer, any_launch, any_unit};
use crate::layouts::layouts;

fn copy(arena: &mut Arena, moves: &[FrameMove], rng: &mut Rng) {
    let pieces = arena.pieces();
    let list: Vec<Move> = moves.iter().map(|step| Move { src: step.src.0, dst: step.dst.0 }).collect();
    let (mut pieces_at, mut moves_at) = (Buffer::of_values(&pieces), Buffer::of_values(&list));
    let unit = any_unit(unit_of(&pieces), rng);
    let mut params =
        CopyParams::new((pieces_at.address(), pieces.len()), (moves_at.address(), list.len()), unit);
    if rng.below(2) == 0 {
        params.moves = 0;
        params.few[..list.len()].copy_from_slice(&list);
    }
    let (ctas, order) = any_launch(rng);
    let (kernel, threads) = match rng.below(4) {
        0 | 1 if params.unit == 16 => ("kvp_copy_bulk", BULK_THREADS),
        teams => ("kvp_copy", COPY_TEAM << teams),
    };
    // SAFETY: the frames exist, in memory that the arena holds.
    unsafe { launch_with(kernel, ctas, threads, params, order) };
    arena.reference.copy(moves);
    arena.check("copy");
}

fn zero(arena: &mut Arena, frames: &[u32], rng: &mut Rng) {
    let pieces = arena.pieces();
    let (mut pieces_at, mut frames_at) = (Buffer::of_values(&pieces), Buffer::of_values(frames));
    let params = ZeroParams {
        pieces: pieces_at.address(),
        frames: frames_at.address(),
        n_pieces: pieces.len() as u32,
        n_frames: frames.len() as u32,
        unit: any_unit(unit_of(&pieces), rng),
        reserved: 0,
    };
    let (ctas, order) = any_launch(rng);
    // SAFETY: as above.
    unsafe { launch("kvp_zero", ctas, params, order) };
    arena.reference.zero(&runs(frames));
    arena.check("zero");
}

/// Packs the frames, or unpacks `unpacked`; packed frames have gaps between them.
fn pack(arena: &mut Arena, frames: &[u32], unpacked: Option<&[u8]>, rng: &mut Rng) {
    let size = arena.layout.packed_bytes();
    let stride = size + [0, 1, 4, 16][rng.below(4)];
    let mut packed = Buffer::poisoned(frames.len() * stride, [0, 0, 1, 4][rng.below(4)]);
    if let Some(bytes) = unpacked {
        for (to, from) in packed.bytes_mut().chunks_mut(stride).zip(bytes.chunks(size)) {
            to[..size].copy_from_slice(from);
        }
    }
    let pieces = arena.pieces();
    let (mut pieces_at, mut frames_at) = (Buffer::of_values(&pieces), Buffer::of_values(frames));
    let places = pieces.iter().map(|piece| u64::from(piece.packed_at));
    let widest = unit_of(&pieces).min(unit(places.chain([packed.address(), stride as u64])));
    let params = PackParams {
        pieces: pieces_at.address(),
        frames: frames_at.address(),
        packed: packed.address(),
        packed_stride: stride as u64,
        n_pieces: pieces.len() as u32,
        n_frames: frames.len() as u32,
        unit: any_unit(widest, rng),
        way: if unpacked.is_some() { Way::In } else { Way::Out },
    };
    let (ctas, order) = any_launch(rng);
    // SAFETY: as above; the packed form has room for every frame.
    unsafe { launch("kvp_pack", ctas, params, order) };
    if let Some(bytes) = unpacked {
        arena.reference.unpack(&runs(frames), bytes);
    }
    let mut want = Buffer::poisoned(frames.len() * stride, 0);
    let expected = arena.reference.pack(&runs(frames));
    for (to, from) in want.bytes_mut().chunks_mut(stride).zip(expected.chunks(size)) {
        to[..size].copy_from_slice(from);
    }
    assert!(packed.bytes() == want.bytes(), "the packed form of {frames:?} of {:?}", arena.layout);
    packed.check_guards();
    arena.check("pack or unpack");
}

fn runs(frames: &[u32]) -> Vec<Run> {
    frames.iter().map(|&frame| Run { start: FrameId(frame), len: 1 }).collect()
}

/// Returns some frames in random order.
fn any_frames(rng: &mut Rng) -> Vec<u32> {
    let mut frames: Vec<u32> = (0..FRAMES as u32).collect();
    (1..frames.len()).rev().for_each(|i| frames.swap(i, rng.below(i + 1)));
    frames.truncate(rng.below(FRAMES + 1));
    frames
}

fn exercise(layout: &KvLayout, scattered: bool, rng: &mut Rng) {
    let mut arena = Arena::new(layout, scattered, rng);
    arena.check("new");
    let frames = any_frames(rng);
    // Copies the first half to the second half; one source may have two destinations.
    let (sources, targets) = frames.split_at(frames.len() / 2);
    if !sources.is_empty() {
        let from = |index: usize| FrameId(sources[index % sources.len()]);
        let moves: Vec<FrameMove> =
            targets.iter().enumerate().map(|(i, &to)| FrameMove::new(from(i), FrameId(to))).collect();
        copy(&mut arena, &moves, rng);
    }
    zero(&mut arena, &any_frames(rng)[..], rng);
    pack(&mut arena, &any_frames(rng), None, rng);
    let frames = any_frames(rng);
    let bytes = rng.bytes(frames.len() * layout.packed_bytes());
    pack(&mut arena, &frames, Some(&bytes), rng);
}

#[test]
fn frames_are_the_references() {
    for (index, layout) in layouts().iter().enumerate() {
        exercise(layout, index % 3 == 2, &mut Rng(index as u64));
    }
}

/// A launch without jobs does not divide by zero and writes nothing.
#[test]
fn nothing_to_do_is_done() {
    let mut rng = Rng(1);
    for order in [Order::ASCENDING, Order::DESCENDING] {
        for (n_pieces, n_moves) in [(0, 0), (0, 3), (3, 0)] {
            let copy = CopyParams::new((0, n_pieces), (0, n_moves), 16);
            for kernel in ["kvp_copy", "kvp_copy_bulk"] {
                // SAFETY: no jobs, so no accesses.
                unsafe { launch(kernel, 1 + rng.below(4) as u32, copy, order) };
            }
        }
    }
}

/// Many pieces of every length pass through each ring of stages, with the moves in a table and as
/// parameters.
#[test]
fn bulk_copies_reuse_their_stages() {
    const COUNT: usize = 23;
    const BYTES: usize = 16 << 10;
    let mut rng = Rng(5);
    for round in 0..6 {
        let content = rng.bytes(2 * COUNT * BYTES);
        let mut memory = Buffer::of_values(&content);
        // One piece per frame; the source and the destination of move `at` are frames of this piece.
        let bytes = |at: usize| [BYTES, 16, 4096, 4112][(at + round) % 4] as u32;
        let lengths = [BYTES as u32, bytes(1), bytes(2)];
        let pieces: Vec<Piece> = lengths
            .iter()
            .map(|&bytes| Piece { base: memory.address(), frame_stride: BYTES as u64, bytes, packed_at: 0 })
            .collect();
        let pieces = &pieces[round % 3..][..1];
        let mut pieces_at = Buffer::of_values(pieces);
        let mut params = CopyParams::new((pieces_at.address(), 1), (0, COUNT), 16);
        for at in 0..COUNT {
            params.few[at] = Move { src: at as u32, dst: (COUNT + (at * 7) % COUNT) as u32 };
        }
        const { assert!(COUNT <= MOVES_INLINE) };
        for ctas in [1, 2, 5, 30] {
            // SAFETY: the frames exist in the buffer; destinations are distinct.
            unsafe { launch_with("kvp_copy_bulk", ctas, BULK_THREADS, params, Order::ASCENDING) };
            let now = memory.bytes().to_vec();
            for step in &params.few[..COUNT] {
                let [src, dst] = [step.src, step.dst].map(|frame| frame as usize * BYTES);
                let len = pieces[0].bytes as usize;
                assert!(now[dst..dst + len] == content[src..src + len], "round {round}, {ctas} CTAs");
            }
        }
    }
}
