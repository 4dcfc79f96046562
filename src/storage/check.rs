//! Checks of arguments before any byte moves: rows, and lists of slots, moves and runs.
//!
//! Common lists pass in one sweep: ascending slots and destinations cannot repeat. Only other lists
//! are sorted, in a scratch copy.

use crate::dtype::Dtype;
use crate::error::StorageError;
use crate::ids::{FRAMES_MAX, FrameId, Run};

use super::FrameMove;
use super::elements::Elements;
use super::layout::{KvLayout, KvPlanes, Scales};

/// Checks the numbers of frames of a storage: at least one, and no more than can be addressed.
///
/// # Errors
/// [`StorageError::FrameCount`].
pub fn frames(frames: usize, frames_max: usize) -> Result<(), StorageError> {
    if frames == 0 || frames > frames_max || frames_max > FRAMES_MAX {
        return Err(StorageError::FrameCount { frames, frames_max, limit: FRAMES_MAX });
    }
    Ok(())
}

/// Checks K and V of `slots` tokens: the layer exists, types match or convert, lengths fit.
///
/// # Errors
/// [`StorageError::Layer`], [`StorageError::Length`]; as for [`dtype`](self::dtype).
pub fn rows(
    layout: &KvLayout,
    layer: usize,
    k: Elements<'_>,
    v: Elements<'_>,
    slots: usize,
) -> Result<(), StorageError> {
    if layer >= layout.layers() {
        return Err(StorageError::Layer { layer, layers: layout.layers() });
    }
    let want = slots.saturating_mul(layout.row_elements());
    let want_v = if layout.parts() == KvPlanes::Latent { 0 } else { want };
    for (which, rows, want) in [("k", k, want), ("v", v, want_v)] {
        // Empty rows need no type check: `Elements::none()` fits every layout.
        if want > 0 || !rows.is_empty() {
            self::dtype(layout, which, rows.dtype())?;
        }
        if rows.len() != want {
            return Err(StorageError::Length { which, got: rows.len(), want });
        }
    }
    Ok(())
}

/// Checks that rows of this type can be stored in the layout, or loaded from it.
///
/// # Errors
/// [`StorageError::BareCodes`], [`StorageError::DtypeMismatch`].
pub fn dtype(layout: &KvLayout, which: &'static str, dtype: Dtype) -> Result<(), StorageError> {
    if dtype == layout.dtype() {
        let bare = dtype.is_quantised() && *layout.scales() == Scales::PerTokenHead;
        return if bare { Err(StorageError::BareCodes { which, dtype }) } else { Ok(()) };
    }
    if layout.dtype().is_quantised() && !dtype.is_quantised() {
        return Ok(());
    }
    Err(StorageError::DtypeMismatch { which, got: dtype, layout: layout.dtype() })
}

/// Checks slots to read: each must be negative or below `frames * block_tokens`.
///
/// # Errors
/// [`StorageError::SlotOutOfRange`].
pub fn slots(slots: &[i64], frames: usize, block_tokens: usize) -> Result<(), StorageError> {
    scan_slots(slots, frames, block_tokens).map(|_| ())
}

/// Checks slots to write: in range, and not repeated.
///
/// # Errors
/// [`StorageError::SlotOutOfRange`], [`StorageError::SlotRepeated`].
pub fn slots_unique(list: &[i64], frames: usize, block_tokens: usize) -> Result<(), StorageError> {
    if scan_slots(list, frames, block_tokens)? {
        return Ok(());
    }
    let Some(slot) = smallest_repeated(list) else { return Ok(()) };
    let mut indices = (0..list.len()).filter(|&index| list[index] == slot);
    let (first, index) = (indices.next().unwrap_or(0), indices.next().unwrap_or(0));
    Err(StorageError::SlotRepeated { first, index, slot })
}

/// Returns the smallest slot that occurs twice, if any.
///
/// Sorts runs of consecutive slots, of which there are far fewer: those of a block follow each
/// other.
fn smallest_repeated(list: &[i64]) -> Option<i64> {
    let mut runs = Vec::<(i64, i64)>::new();
    for &slot in list.iter().filter(|&&slot| slot >= 0) {
        match runs.last_mut() {
            Some((_, end)) if *end == slot => *end += 1,
            _ => runs.push((slot, slot + 1)),
        }
    }
    runs.sort_unstable();
    let mut end_max = 0;
    // The first run, by its start, that begins within an earlier one begins with a repeated slot. A
    // smaller one would be within an earlier run, too.
    runs.into_iter().find_map(|(start, end)| {
        let is_within = start < end_max;
        end_max = end_max.max(end);
        is_within.then_some(start)
    })
}

/// Checks the range of the slots, and returns true if the non-negative ones ascend strictly.
fn scan_slots(slots: &[i64], frames: usize, block_tokens: usize) -> Result<bool, StorageError> {
    // Saturating: a limit above i64 refuses no slot, and no such storage can exist.
    let limit = i64::try_from(frames.saturating_mul(block_tokens)).unwrap_or(i64::MAX);
    let (mut last, mut ascending) = (-1, true);
    for (index, &slot) in slots.iter().enumerate() {
        if slot < 0 {
            continue;
        }
        if slot >= limit {
            return Err(StorageError::SlotOutOfRange { index, slot, slots: limit });
        }
        ascending &= slot > last;
        last = slot;
    }
    Ok(ascending)
}

/// Checks moves: frames in range, and destinations distinct and different from all sources.
///
/// # Errors
/// [`StorageError::FrameOutOfRange`], [`StorageError::DestinationRepeated`],
/// [`StorageError::DestinationIsSource`].
pub fn moves(moves: &[FrameMove], frames: usize) -> Result<(), StorageError> {
    for (index, step) in moves.iter().enumerate() {
        for frame in [step.src, step.dst] {
            if frame.index() >= frames {
                return Err(StorageError::FrameOutOfRange { index, frame, frames });
            }
        }
    }
    let mut scratch: Vec<(FrameId, usize)> =
        moves.iter().enumerate().map(|(index, step)| (step.dst, index)).collect();
    if !scratch.is_sorted_by(|a, b| a.0 < b.0) {
        scratch.sort_unstable();
    }
    if let Some([a, b]) = pairs(&scratch).find(|[a, b]| a.0 == b.0) {
        return Err(StorageError::DestinationRepeated { first: a.1, index: b.1, frame: a.0 });
    }
    for (source_index, step) in moves.iter().enumerate() {
        if let Ok(found) = scratch.binary_search_by_key(&step.src, |&(dst, _)| dst) {
            let (frame, index) = scratch[found];
            return Err(StorageError::DestinationIsSource { index, source_index, frame });
        }
    }
    Ok(())
}

/// Checks that runs to read are in range. Returns their total number of frames.
///
/// # Errors
/// [`StorageError::RunOutOfRange`].
pub fn runs(runs: &[Run], frames: usize) -> Result<usize, StorageError> {
    let mut count = 0usize;
    for (index, &run) in runs.iter().enumerate() {
        if run.start.index() + run.len as usize > frames {
            return Err(StorageError::RunOutOfRange { index, run, frames });
        }
        count = count.saturating_add(run.len as usize);
    }
    Ok(count)
}

/// Checks runs to write: in range and disjoint. Returns their total number of frames.
///
/// # Errors
/// [`StorageError::RunOutOfRange`], [`StorageError::RunsOverlap`].
pub fn runs_disjoint(list: &[Run], frames: usize) -> Result<usize, StorageError> {
    let count = runs(list, frames)?;
    let mut scratch: Vec<(Run, usize)> =
        list.iter().copied().zip(0..).filter(|(run, _)| run.len > 0).collect();
    if !scratch.is_sorted_by_key(|&(run, _)| run.start) {
        scratch.sort_unstable_by_key(|&(run, index)| (run.start, index));
    }
    if let Some([a, b]) = pairs(&scratch).find(|[a, b]| b.0.start.0 < a.0.end()) {
        return Err(StorageError::RunsOverlap { first: a.1, second: b.1, frame: b.0.start });
    }
    Ok(count)
}

/// Returns the adjacent pairs of a list.
fn pairs<T>(list: &[T]) -> impl Iterator<Item = [&T; 2]> {
    list.windows(2).map(|pair| [&pair[0], &pair[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn run(start: u32, len: u32) -> Run {
        Run { start: FrameId(start), len }
    }

    const fn step(src: u32, dst: u32) -> FrameMove {
        FrameMove::new(FrameId(src), FrameId(dst))
    }

    #[test]
    fn slots_name_the_culprit() {
        assert_eq!(slots_unique(&[-1, 3, -7, 4, 0], 2, 4), Ok(()));
        assert_eq!(
            slots_unique(&[1, -1, 8], 2, 4),
            Err(StorageError::SlotOutOfRange { index: 2, slot: 8, slots: 8 })
        );
        assert_eq!(
            slots_unique(&[5, 1, -1, -1, 5, 1], 2, 4),
            Err(StorageError::SlotRepeated { first: 1, index: 5, slot: 1 })
        );
        assert_eq!(slots(&[5, 1, 5], 2, 4), Ok(()));
        assert!(slots(&[i64::MAX], 2, 4).is_err());
        assert_eq!(slots(&[i64::MIN], 2, 4), Ok(()));
    }

    /// As after sorting all slots, for lists with and without runs.
    #[test]
    fn the_smallest_repeated_slot_is_found() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..if cfg!(miri) { 20 } else { 5_000 } {
            let mut list = Vec::new();
            for _ in 0..rng.usize(..8) {
                let start = rng.i64(-2..60);
                list.extend(
                    (start..start + rng.i64(1..9)).map(|slot| if rng.u8(..20) == 0 { -1 } else { slot }),
                );
            }
            let mut sorted: Vec<i64> = list.iter().copied().filter(|&slot| slot >= 0).collect();
            sorted.sort_unstable();
            let repeated = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
            assert_eq!(smallest_repeated(&list), repeated, "{list:?}");
        }
    }

    #[test]
    fn moves_name_the_culprit() {
        assert_eq!(moves(&[step(0, 2), step(0, 1)], 3), Ok(()));
        assert_eq!(
            moves(&[step(0, 1), step(3, 2)], 3),
            Err(StorageError::FrameOutOfRange { index: 1, frame: FrameId(3), frames: 3 })
        );
        assert_eq!(
            moves(&[step(0, 2), step(0, 1), step(0, 2)], 3),
            Err(StorageError::DestinationRepeated { first: 0, index: 2, frame: FrameId(2) })
        );
        assert_eq!(
            moves(&[step(0, 1), step(1, 2)], 3),
            Err(StorageError::DestinationIsSource { index: 0, source_index: 1, frame: FrameId(1) })
        );
        assert!(moves(&[step(1, 1)], 3).is_err());
    }

    #[test]
    fn runs_name_the_culprit() {
        assert_eq!(runs_disjoint(&[run(4, 2), run(0, 4), run(5, 0)], 6), Ok(6));
        assert_eq!(
            runs(&[run(0, 2), run(5, 2)], 6),
            Err(StorageError::RunOutOfRange { index: 1, run: run(5, 2), frames: 6 })
        );
        assert!(runs(&[run(u32::MAX, u32::MAX)], 6).is_err());
        assert_eq!(
            runs_disjoint(&[run(3, 2), run(0, 4)], 6),
            Err(StorageError::RunsOverlap { first: 1, second: 0, frame: FrameId(3) })
        );
    }
}
