//! Checks of arguments before any byte moves. Common lists take one sweep: ascending slots and
//! destinations cannot repeat. Other lists are sorted in a scratch copy.

use crate::dtype::Dtype;
use crate::error::Invalid;
use crate::ids::{FRAMES_MAX, FrameId, Run};

use super::FrameMove;
use super::elements::Elements;
use super::layout::{KvLayout, KvPlanes, Scales};

/// Checks the numbers of frames of a storage.
pub fn frames(frames: usize, frames_max: usize) -> Result<(), Invalid> {
    if frames == 0 || frames > frames_max || frames_max > FRAMES_MAX {
        let got = format_args!("{frames} with a maximum of {frames_max}");
        let limit = format_args!("1 up to the maximum, which is at most {FRAMES_MAX}");
        return Err(Invalid::new("number of frames", got, limit));
    }
    Ok(())
}

/// Checks K and V of `slots` tokens: the layer exists, types match or convert, lengths fit.
pub fn rows(
    layout: &KvLayout,
    layer: usize,
    k: Elements<'_>,
    v: Elements<'_>,
    slots: usize,
) -> Result<(), Invalid> {
    self::layer(layout, layer)?;
    let want = slots.saturating_mul(layout.row_elements());
    let want_v = if layout.parts() == KvPlanes::Latent { 0 } else { want };
    for (which, rows, want) in [("k", k, want), ("v", v, want_v)] {
        // Empty rows need no type check: `Elements::none()` fits every layout.
        if want > 0 || !rows.is_empty() {
            self::dtype(layout, which, rows.dtype())?;
        }
        if rows.len() != want {
            let (got, want) = (format_args!("{} elements", rows.len()), format_args!("{want}"));
            return Err(Invalid::new(which, got, want));
        }
    }
    Ok(())
}

/// Checks that a layer exists.
pub fn layer(layout: &KvLayout, layer: usize) -> Result<(), Invalid> {
    below("layer", layer, layout.layers())
}

/// Checks that a frame, at `index` of a list, exists.
pub fn frame(index: usize, frame: FrameId, frames: usize) -> Result<(), Invalid> {
    below("frame", frame.index(), frames).map_err(|error| error.at(index))
}

fn below(what: &'static str, got: usize, end: usize) -> Result<(), Invalid> {
    if got < end { Ok(()) } else { Err(Invalid::new(what, got, format_args!("less than {end}"))) }
}

/// Checks that a packed buffer has the size of its blocks.
pub fn packed_bytes(got: usize, want: usize) -> Result<(), Invalid> {
    if got == want {
        return Ok(());
    }
    Err(Invalid::new("packed buffer", format_args!("{got} bytes"), format_args!("{want}")))
}

/// Checks that rows of this type can be stored in the layout, or loaded from it.
pub fn dtype(layout: &KvLayout, which: &'static str, dtype: Dtype) -> Result<(), Invalid> {
    if dtype == layout.dtype() {
        if !dtype.is_quantised() || *layout.scales() != Scales::PerTokenHead {
            return Ok(());
        }
        let got = format_args!("{dtype} codes without scales");
        return Err(Invalid::new(which, got, "f32, f16 or bf16, as the layout has dynamic scales"));
    }
    if layout.dtype().is_quantised() && !dtype.is_quantised() {
        return Ok(());
    }
    Err(Invalid::new(which, dtype, format_args!("{}, as in the layout", layout.dtype())))
}

/// Checks slots to read: each must be negative or below `frames * block_tokens`.
pub fn slots(slots: &[i64], frames: usize, block_tokens: usize) -> Result<(), Invalid> {
    scan_slots(slots, frames, block_tokens).map(|_| ())
}

/// Checks slots to write: in range, and not repeated.
pub fn slots_unique(list: &[i64], frames: usize, block_tokens: usize) -> Result<(), Invalid> {
    if scan_slots(list, frames, block_tokens)? {
        return Ok(());
    }
    let Some(slot) = smallest_repeated(list) else { return Ok(()) };
    let mut indices = (0..list.len()).filter(|&index| list[index] == slot);
    let (first, index) = (indices.next().unwrap_or(0), indices.next().unwrap_or(0));
    Err(Invalid::new("slot", slot, format_args!("another than at index {first}")).at(index))
}

/// Returns the smallest slot that occurs twice, if any. Sorts runs of consecutive slots, which are
/// far fewer than slots.
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
    // The first run, by start, that begins within an earlier one begins with a repeated slot. A
    // smaller repeated slot would be within an earlier run, too.
    runs.into_iter().find_map(|(start, end)| {
        let is_within = start < end_max;
        end_max = end_max.max(end);
        is_within.then_some(start)
    })
}

/// Checks the range of the slots. Returns whether the non-negative ones ascend strictly.
fn scan_slots(slots: &[i64], frames: usize, block_tokens: usize) -> Result<bool, Invalid> {
    // Saturating: a limit above i64 accepts every slot, and no such storage can exist.
    let limit = i64::try_from(frames.saturating_mul(block_tokens)).unwrap_or(i64::MAX);
    let (mut last, mut ascending) = (-1, true);
    for (index, &slot) in slots.iter().enumerate() {
        if slot < 0 {
            continue;
        }
        if slot >= limit {
            return Err(Invalid::new("slot", slot, format_args!("less than {limit}")).at(index));
        }
        ascending &= slot > last;
        last = slot;
    }
    Ok(ascending)
}

/// Checks moves: frames in range, and destinations distinct and different from all sources.
pub fn moves(moves: &[FrameMove], frames: usize) -> Result<(), Invalid> {
    for (index, step) in moves.iter().enumerate() {
        self::frame(index, step.src, frames)?;
        self::frame(index, step.dst, frames)?;
    }
    let mut scratch: Vec<(FrameId, usize)> =
        moves.iter().enumerate().map(|(index, step)| (step.dst, index)).collect();
    if !scratch.is_sorted_by(|a, b| a.0 < b.0) {
        scratch.sort_unstable();
    }
    if let Some([a, b]) = pairs(&scratch).find(|[a, b]| a.0 == b.0) {
        let limit = format_args!("another frame than at index {}", a.1);
        return Err(Invalid::new("destination", b.0, limit).at(b.1));
    }
    for (source_index, step) in moves.iter().enumerate() {
        if let Ok(found) = scratch.binary_search_by_key(&step.src, |&(dst, _)| dst) {
            let (frame, index) = scratch[found];
            let limit = format_args!("another frame than the source at index {source_index}");
            return Err(Invalid::new("destination", frame, limit).at(index));
        }
    }
    Ok(())
}

/// Checks that runs to read are in range. Returns their total number of frames.
pub fn runs(runs: &[Run], frames: usize) -> Result<usize, Invalid> {
    let mut count = 0usize;
    for (index, &run) in runs.iter().enumerate() {
        if run.start.index() + run.len as usize > frames {
            let got = format_args!("{} frames from {}", run.len, run.start);
            return Err(Invalid::new("run", got, format_args!("frames below {frames}")).at(index));
        }
        count = count.saturating_add(run.len as usize);
    }
    Ok(count)
}

/// Checks runs to write: in range and disjoint. Returns their total number of frames.
pub fn runs_disjoint(list: &[Run], frames: usize) -> Result<usize, Invalid> {
    let count = runs(list, frames)?;
    let mut scratch: Vec<(Run, usize)> =
        list.iter().copied().zip(0..).filter(|(run, _)| run.len > 0).collect();
    if !scratch.is_sorted_by_key(|&(run, _)| run.start) {
        scratch.sort_unstable_by_key(|&(run, index)| (run.start, index));
    }
    if let Some([a, b]) = pairs(&scratch).find(|[a, b]| b.0.start.0 < a.0.end()) {
        let limit = format_args!("frames that the run at index {} does not have", a.1);
        return Err(Invalid::new("run", format_args!("frame {}", b.0.start), limit).at(b.1));
    }
    Ok(count)
}

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

    fn refused<T: std::fmt::Debug>(outcome: Result<T, Invalid>, message: &str) {
        assert_eq!(outcome.unwrap_err().to_string(), message);
    }

    #[test]
    fn slots_name_the_culprit() {
        assert_eq!(slots_unique(&[-1, 3, -7, 4, 0], 2, 4), Ok(()));
        refused(slots_unique(&[1, -1, 8], 2, 4), "slot at index 2: got 8, expected less than 8");
        refused(
            slots_unique(&[5, 1, -1, -1, 5, 1], 2, 4),
            "slot at index 5: got 1, expected another than at index 1",
        );
        assert_eq!(slots(&[5, 1, 5], 2, 4), Ok(()));
        assert!(slots(&[i64::MAX], 2, 4).is_err());
        assert_eq!(slots(&[i64::MIN], 2, 4), Ok(()));
    }

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
        refused(moves(&[step(0, 1), step(3, 2)], 3), "frame at index 1: got 3, expected less than 3");
        refused(
            moves(&[step(0, 2), step(0, 1), step(0, 2)], 3),
            "destination at index 2: got 2, expected another frame than at index 0",
        );
        refused(
            moves(&[step(0, 1), step(1, 2)], 3),
            "destination at index 0: got 1, expected another frame than the source at index 1",
        );
        assert!(moves(&[step(1, 1)], 3).is_err());
    }

    #[test]
    fn runs_name_the_culprit() {
        assert_eq!(runs_disjoint(&[run(4, 2), run(0, 4), run(5, 0)], 6), Ok(6));
        refused(
            runs(&[run(0, 2), run(5, 2)], 6),
            "run at index 1: got 2 frames from 5, expected frames below 6",
        );
        assert!(runs(&[run(u32::MAX, u32::MAX)], 6).is_err());
        refused(
            runs_disjoint(&[run(3, 2), run(0, 4)], 6),
            "run at index 0: got frame 3, expected frames that the run at index 1 does not have",
        );
    }
}
