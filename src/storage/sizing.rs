use crate::error::Invalid;
use crate::ids::FRAMES_MAX;

use super::layout::KvLayout;

/// Size of a pool: a number of frames, or a share of memory.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Sizing {
    /// This number, including the null block's frame.
    Frames(usize),
    /// As many as fit beside the model: `(ratio * free_before - model_bytes) / bytes_per_block`.
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
    /// Returns the number of frames, including the null block's. Fails if the ratio is not in `(0,
    /// 1]`, fewer frames than `frames_min` fit, or [`Sizing::Frames`] exceeds [`FRAMES_MAX`].
    pub fn frames(&self, layout: &KvLayout, frames_min: usize) -> Result<usize, Invalid> {
        let bytes_per_block = layout.bytes_per_block() as u64;
        let (frames, bytes) = match *self {
            Self::Frames(frames) if frames > FRAMES_MAX => {
                return Err(Invalid::new("frames", frames, format_args!("at most {FRAMES_MAX}")));
            }
            Self::Frames(frames) => (frames, bytes_per_block.saturating_mul(frames as u64)),
            Self::Memory { ratio, free_before, model_bytes } => {
                if !(ratio > 0.0 && ratio <= 1.0) {
                    return Err(Invalid::new("memory ratio", ratio, "above 0 and at most 1"));
                }
                // The cast truncates; a float represents sizes up to 8 PiB exactly.
                let bytes = ((ratio * free_before as f64) as u64).saturating_sub(model_bytes);
                let frames = usize::try_from(bytes / bytes_per_block).unwrap_or(usize::MAX);
                (frames.min(FRAMES_MAX), bytes)
            }
        };
        if frames < frames_min.max(1) {
            let got = format_args!("{frames} in the {bytes} bytes left after the model");
            return Err(Invalid::new("frames", got, format_args!("at least {}", frames_min.max(1))));
        }
        Ok(frames)
    }
}

/// Returns the least free memory of all tensor-parallel ranks in bytes, so that all ranks can size
/// their pools alike. The values may differ by at most `tolerance`, a share of the largest in `[0,
/// 1)`; the error names the rank.
pub fn check_balance(free_by_rank: &[u64], tolerance: f64) -> Result<u64, Invalid> {
    if !(0.0..1.0).contains(&tolerance) {
        return Err(Invalid::new("tolerance", tolerance, "at least 0 and below 1"));
    }
    let ranks = || free_by_rank.iter().copied().zip(0..);
    let (Some((free, rank)), Some((most, most_rank))) = (ranks().min(), ranks().max()) else {
        return Err(Invalid::new("tensor-parallel ranks", 0, "at least 1"));
    };
    if (free as f64) < most as f64 * (1.0 - tolerance) {
        let limit = format_args!("{most} bytes, as on rank {most_rank}, less at most a share of {tolerance}");
        return Err(Invalid::new("free memory of a rank", format_args!("{free} bytes"), limit).at(rank));
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
            assert_eq!(memory(ratio, 1 << 40, 0).frames(&layout, 1).unwrap_err().what, "memory ratio");
        }
        let refused = |sizing: Sizing, min| sizing.frames(&layout, min).unwrap_err().to_string();
        assert_eq!(
            refused(memory(0.5, 2 << 20, 0), 2),
            "frames: got 1 in the 1048576 bytes left after the model, expected at least 2"
        );
        for sizing in [memory(0.5, 1 << 30, 1 << 30), Sizing::Frames(0)] {
            assert!(refused(sizing, 0).ends_with("expected at least 1"));
        }
        assert!(refused(Sizing::Frames(FRAMES_MAX + 1), 0).ends_with(&format!("at most {FRAMES_MAX}")));
    }

    #[test]
    fn ranks_are_about_equal() {
        assert_eq!(check_balance(&[100, 95, 99], 0.1), Ok(95));
        assert_eq!(check_balance(&[7], 0.0), Ok(7));
        assert_eq!(check_balance(&[0, 0], 0.0), Ok(0));
        assert_eq!(
            check_balance(&[100, 80, 99], 0.1).unwrap_err().to_string(),
            "free memory of a rank at index 1: got 80 bytes, \
             expected 100 bytes, as on rank 0, less at most a share of 0.1"
        );
        for (ranks, tolerance, what) in
            [(&[][..], 0.1, "tensor-parallel ranks"), (&[1], f64::NAN, "tolerance"), (&[1], 1.0, "tolerance")]
        {
            assert_eq!(check_balance(ranks, tolerance).unwrap_err().what, what);
        }
    }
}
