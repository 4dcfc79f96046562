//! Copies frames directly from another storage's memory.
//!
//! The packed form of a frame is the same for every arrangement; arrangements only cut it
//! differently. If the extents of both sides are equal, they are copied one by one, with
//! consecutive frames as one piece if contiguous. Otherwise pieces are cut wherever either side is
//! cut.

use crate::ids::Run;

use super::super::FrameMove;
use super::super::stream::Copier;
use super::{Tile, Tiles, joined_moves};

fn frames_of(runs: &[Run]) -> impl Iterator<Item = crate::ids::FrameId> {
    runs.iter().flat_map(|run| run.frames())
}

impl Tiles {
    /// # Safety
    /// The frames exist on both sides; `to` and `from` have equally many, and those in `to` are
    /// distinct; the blocks have the same packed form; the storages use different memory; the frame
    /// rule.
    pub(in super::super) unsafe fn receive(&self, source: &Self, from: &[Run], to: &[Run]) {
        let moves: Vec<FrameMove> =
            frames_of(from).zip(frames_of(to)).map(|(src, dst)| FrameMove::new(src, dst)).collect();
        let mut copier = Copier::new(self.bytes_of(moves.len()));
        let bytes = |tiles: &[Tile]| tiles.iter().map(|tile| tile.bytes).collect::<Vec<_>>();
        if bytes(&self.extents) == bytes(&source.extents) {
            for (theirs, ours) in source.extents.iter().zip(&self.extents) {
                for (step, len) in joined_moves(&moves) {
                    // SAFETY: the caller's promise; joined moves contain only frames of the runs.
                    unsafe { copy_neighbours(theirs, ours, step, len, &mut copier) };
                }
            }
        } else {
            for &step in &moves {
                // SAFETY: the caller's promise.
                unsafe { copy_frame(&source.extents, &self.extents, step, &mut copier) };
            }
        }
        copier.finish();
    }
}

/// # Safety
/// The frames exist on both sides; the extents have the same size and are different memory; the
/// frame rule.
unsafe fn copy_neighbours(theirs: &Tile, ours: &Tile, first: FrameMove, len: usize, copier: &mut Copier) {
    // SAFETY: the first of frames that exist; below, the others.
    let (from, to) = unsafe { (theirs.of(first.src.index()), ours.of(first.dst.index())) };
    let is_dense = |tile: &Tile| tile.bytes == tile.frame_stride;
    if is_dense(theirs) && is_dense(ours) {
        // SAFETY: the frames are contiguous on both sides.
        return unsafe { copier.copy(from, to, len * ours.bytes) };
    }
    for frame in 0..len {
        // SAFETY: as above.
        unsafe {
            copier.copy(from.add(frame * theirs.frame_stride), to.add(frame * ours.frame_stride), ours.bytes);
        }
    }
}

/// Copies a frame in packed order.
///
/// # Safety
/// As for [`copy_neighbours`]; both sides' extents have the same total size.
unsafe fn copy_frame(theirs: &[Tile], ours: &[Tile], step: FrameMove, copier: &mut Copier) {
    let (mut theirs, mut ours) = (theirs.iter(), ours.iter());
    let (mut source, mut target) = (theirs.next(), ours.next());
    let (mut read, mut written) = (0, 0);
    while let (Some(from), Some(to)) = (source, target) {
        let bytes = (from.bytes - read).min(to.bytes - written);
        // SAFETY: within an extent of a frame that exists, on both sides.
        unsafe {
            copier.copy(from.of(step.src.index()).add(read), to.of(step.dst.index()).add(written), bytes)
        };
        (read, written) = (read + bytes, written + bytes);
        if read == from.bytes {
            (source, read) = (theirs.next(), 0);
        }
        if written == to.bytes {
            (target, written) = (ours.next(), 0);
        }
    }
}
