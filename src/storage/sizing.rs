//! The number of frames that fit into memory.

use crate::error::SizingError;
use crate::ids::FRAMES_MAX;

use super::layout::KvLayout;

/// Size of a pool: a number of frames, or a share of memory.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Sizing {
    /// This number, including the null block's frame.
    Frames(usize),
    /// As many as fit into a share of the memory, beside the model:
    /// `(ratio * free_before - model_bytes) / bytes_per_block`.
    Memory {
        /// Share of the free memory for the model and the frames together, in `(0, 1]`.
        ratio: f64,
        /// Free memory in bytes before the model was loaded.
        free_before: u64,
        /// Memory in bytes that the model takes: weights, activations, graphs.
        model_bytes: u64,
    },
}

impl Sizing {
    /// Returns the number of frames, including the null block's, at most [`FRAMES_MAX`].
    ///
    /// # Errors
    /// [`SizingError::Ratio`], [`SizingError::TooFew`] below `frames_min`, [`SizingError::TooMany`]
    /// if [`Sizing::Frames`] exceeds what a pool can address.
    pub fn frames(&self, layout: &KvLayout, frames_min: usize) -> Result<usize, SizingError> {
        let bytes_per_block = layout.bytes_per_block() as u64;
        let (frames, bytes) = match *self {
            Self::Frames(frames) if frames > FRAMES_MAX => {
                return Err(SizingError::TooMany { frames, max: FRAMES_MAX });
            }
            Self::Frames(frames) => (frames, bytes_per_block.saturating_mul(frames as u64)),
            Self::Memory { ratio, free_before, model_bytes } => {
                if !(ratio > 0.0 && ratio <= 1.0) {
                    return Err(SizingError::Ratio { ratio });
                }
                // The cast truncates; a float represents sizes up to 8 PiB exactly.
                let bytes = ((ratio * free_before as f64) as u64).saturating_sub(model_bytes);
                let frames = usize::try_from(bytes / bytes_per_block).unwrap_or(usize::MAX);
                (frames.min(FRAMES_MAX), bytes)
            }
        };
        if frames < frames_min.max(1) {
            return Err(SizingError::TooFew { frames, bytes, min: frames_min.max(1) });
        }
        Ok(frames)
    }
}

/// Returns the least free memory of all tensor-parallel ranks, in bytes.
///
/// Every rank sizes its pool by it, so that all have the same number of frames. The ranks' values
/// may differ by at most `tolerance`, a share of the largest.
///
/// # Errors
/// [`SizingError::NoRanks`], [`SizingError::Tolerance`], or [`SizingError::Unbalanced`], which
/// names the rank.
pub fn check_balance(free_by_rank: &[u64], tolerance: f64) -> Result<u64, SizingError> {
    if !(0.0..1.0).contains(&tolerance) {
        return Err(SizingError::Tolerance { tolerance });
    }
    let ranks = || free_by_rank.iter().copied().zip(0..);
    let (Some((free, rank)), Some((most, most_rank))) = (ranks().min(), ranks().max()) else {
        return Err(SizingError::NoRanks);
    };
    if (free as f64) < most as f64 * (1.0 - tolerance) {
        return Err(SizingError::Unbalanced { rank, free, most_rank, most, tolerance });
    }
    Ok(free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(ratio: f64, free_before: u64, model_bytes: u64) -> Sizing {
        Sizing::Memory { ratio, free_before, model_bytes }
    }

    #[test]
    fn frames_from_memory() {
        let layout = KvLayout::named("qwen2.5-7b").unwrap();
        assert_eq!(layout.bytes_per_block(), 896 << 10);
        let frames = memory(0.9, 80_000_000_000, 16_000_000_000).frames(&layout, 2);
        assert_eq!(frames, Ok(56_000_000_000 / (896 << 10)));
        assert_eq!(memory(1.0, u64::MAX, 0).frames(&layout, 2), Ok(FRAMES_MAX));
        assert_eq!(Sizing::Frames(77).frames(&layout, 2), Ok(77));
    }

    #[test]
    fn sizes_that_cannot_be() {
        let layout = KvLayout::named("qwen2.5-7b").unwrap();
        for ratio in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
            assert!(matches!(memory(ratio, 1 << 40, 0).frames(&layout, 1), Err(SizingError::Ratio { .. })));
        }
        let too_few = memory(0.5, 2 << 20, 0).frames(&layout, 2);
        assert_eq!(too_few, Err(SizingError::TooFew { frames: 1, bytes: 1 << 20, min: 2 }));
        assert!(matches!(memory(0.5, 1 << 30, 1 << 30).frames(&layout, 0), Err(SizingError::TooFew { .. })));
        assert!(matches!(Sizing::Frames(0).frames(&layout, 0), Err(SizingError::TooFew { .. })));
        assert!(matches!(
            Sizing::Frames(FRAMES_MAX + 1).frames(&layout, 0),
            Err(SizingError::TooMany { .. })
        ));
    }

    #[test]
    fn ranks_are_about_equal() {
        assert_eq!(check_balance(&[100, 95, 99], 0.1), Ok(95));
        assert_eq!(check_balance(&[7], 0.0), Ok(7));
        assert_eq!(check_balance(&[0, 0], 0.0), Ok(0));
        assert_eq!(
            check_balance(&[100, 80, 99], 0.1),
            Err(SizingError::Unbalanced { rank: 1, free: 80, most_rank: 0, most: 100, tolerance: 0.1 })
        );
        assert_eq!(check_balance(&[], 0.1), Err(SizingError::NoRanks));
        assert!(matches!(check_balance(&[1], f64::NAN), Err(SizingError::Tolerance { .. })));
        assert!(matches!(check_balance(&[1], 1.0), Err(SizingError::Tolerance { .. })));
    }
}
