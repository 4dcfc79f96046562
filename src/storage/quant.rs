//! Quantisation of rows on store, and dequantisation on load.
//!
//! ```text
//! code  = nearest(value * (1 / scale))        value' = code * scale
//! error <= |value| / 16 (e4m3)   |value| / 8 (e5m2)   scale / 2 (int8)   unless the code saturates
//! ```
//!
//! and for the 8-bit floats at least half a subnormal step, `scale * 2^-10` or `scale * 2^-17`. A
//! dynamic scale maps the largest finite magnitude of one token's head to the largest code, so no
//! finite value saturates. Infinity saturates; NaN stays NaN in the 8-bit floats and becomes 0 in
//! int8. Values are multiplied by the scale's inverse in f32, as in device kernels, which give the
//! same codes.

use half::{bf16, f16};

use crate::dtype::Dtype;

use super::elements::{Elements, ElementsMut};
use super::fp8;

pub(super) enum RowScales<'a> {
    Unit,
    /// Static: one per head.
    PerHead(&'a [f32]),
    /// Dynamic: in the row's scale tile, one per head, written on store and read on load.
    InTile(*mut u8),
}

const fn code_max(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Fp8E4M3 => fp8::E4M3_MAX,
        Dtype::Fp8E5M2 => fp8::E5M2_MAX,
        _ => i8::MAX as f32,
    }
}

/// Returns the scale that maps the largest finite magnitude to the largest code, with finite
/// inverse.
fn dynamic_scale(dtype: Dtype, values: &[f32]) -> f32 {
    let magnitude = |value: f32| if value.is_finite() { value.abs() } else { 0.0 };
    let largest = values.iter().fold(0.0f32, |largest, &value| largest.max(magnitude(value)));
    (largest / code_max(dtype)).max(f32::MIN_POSITIVE)
}

/// Quantises one row of `heads * head_dim` values, from element `first` of `source`, into `codes`.
/// `values` is a scratch buffer of `head_dim` elements.
///
/// # Safety
/// `RowScales::InTile` points to `heads` f32 of any alignment, which no one else accesses.
pub(super) unsafe fn store_row(
    dtype: Dtype,
    source: Elements<'_>,
    first: usize,
    scales: &RowScales<'_>,
    values: &mut [f32],
    codes: &mut [u8],
) {
    let head_dim = values.len();
    for (head, codes) in codes.chunks_exact_mut(head_dim).enumerate() {
        widen(source, first + head * head_dim, values);
        let scale = match *scales {
            RowScales::Unit => 1.0,
            RowScales::PerHead(scales) => scales[head],
            RowScales::InTile(tile) => {
                let scale = dynamic_scale(dtype, values);
                // SAFETY: the caller provides room for one f32 per head.
                unsafe { tile.cast::<f32>().add(head).write_unaligned(scale) };
                scale
            }
        };
        encode(dtype, values, scale.recip(), codes);
    }
}

/// Converts one row of codes to values: the inverse of [`store_row`].
///
/// # Safety
/// `RowScales::InTile` points to `heads` f32 of any alignment, which no one writes.
pub(super) unsafe fn load_row(
    dtype: Dtype,
    codes: &[u8],
    scales: &RowScales<'_>,
    values: &mut [f32],
    target: &mut ElementsMut<'_>,
    first: usize,
) {
    let head_dim = values.len();
    for (head, codes) in codes.chunks_exact(head_dim).enumerate() {
        let scale = match *scales {
            RowScales::Unit => 1.0,
            RowScales::PerHead(scales) => scales[head],
            // SAFETY: the caller provides one f32 per head.
            RowScales::InTile(tile) => unsafe { tile.cast::<f32>().add(head).read_unaligned() },
        };
        decode(dtype, codes, scale, values);
        narrow(values, target, first + head * head_dim);
    }
}

fn encode(dtype: Dtype, values: &[f32], inverse: f32, codes: &mut [u8]) {
    let pairs = codes.iter_mut().zip(values);
    match dtype {
        Dtype::Fp8E4M3 => pairs.for_each(|(code, value)| *code = fp8::E4M3.encode(value * inverse)),
        Dtype::Fp8E5M2 => pairs.for_each(|(code, value)| *code = fp8::E5M2.encode(value * inverse)),
        _ => pairs.for_each(|(code, value)| *code = int8(value * inverse) as u8),
    }
}

/// Returns the nearest integer from -127 to 127, ties to even; 0 for NaN.
#[inline(always)]
fn int8(value: f32) -> i8 {
    // The last place of this number is 1 and its low byte is 0: adding it makes the adder round,
    // and leaves the integer in the low byte. `round` is a function call on the baseline target.
    const ROUND: f32 = (3 << (f32::MANTISSA_DIGITS - 2)) as f32;
    let finite = if value.is_nan() { 0.0 } else { value.clamp(-127.0, 127.0) };
    (finite + ROUND).to_bits() as i8
}

fn decode(dtype: Dtype, codes: &[u8], scale: f32, values: &mut [f32]) {
    let pairs = values.iter_mut().zip(codes);
    match dtype {
        Dtype::Fp8E4M3 => {
            pairs.for_each(|(value, &code)| *value = fp8::E4M3_VALUES[code as usize] * scale);
        }
        Dtype::Fp8E5M2 => {
            pairs.for_each(|(value, &code)| *value = fp8::E5M2_VALUES[code as usize] * scale);
        }
        _ => pairs.for_each(|(value, &code)| *value = f32::from(code as i8) * scale),
    }
}

/// Converts f32, f16 or bf16 elements from `first` on to f32, exactly.
fn widen(source: Elements<'_>, first: usize, values: &mut [f32]) {
    let size = source.dtype().bytes();
    let bytes = &source.as_bytes()[first * size..][..values.len() * size];
    match source.dtype() {
        Dtype::F16 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = f16::from_ne_bytes(*bytes).to_f32();
            }
        }
        Dtype::Bf16 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = bf16::from_ne_bytes(*bytes).to_f32();
            }
        }
        _ => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_ne_bytes(*bytes);
            }
        }
    }
}

/// Converts f32 values to f32, f16 or bf16 elements from `first` on, rounded to nearest.
fn narrow(values: &[f32], target: &mut ElementsMut<'_>, first: usize) {
    let dtype = target.as_elements().dtype();
    let size = dtype.bytes();
    let bytes = &mut target.as_bytes_mut()[first * size..][..values.len() * size];
    match dtype {
        Dtype::F16 => {
            for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = f16::from_f32(*value).to_ne_bytes();
            }
        }
        Dtype::Bf16 => {
            for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = bf16::from_f32(*value).to_ne_bytes();
            }
        }
        _ => {
            for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = value.to_ne_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUANTISED: [Dtype; 3] = [Dtype::Fp8E4M3, Dtype::Fp8E5M2, Dtype::Int8];

    fn round_trip(dtype: Dtype, row: &[f32]) -> (Vec<f32>, f32) {
        let (mut scale, mut scratch) = (0f32, vec![0.0; row.len()]);
        let (mut codes, mut back) = (vec![0u8; row.len()], vec![0f32; row.len()]);
        let scales = RowScales::InTile((&raw mut scale).cast());
        // SAFETY: room for the scale of the one head.
        unsafe {
            store_row(dtype, row.into(), 0, &scales, &mut scratch, &mut codes);
            load_row(dtype, &codes, &scales, &mut scratch, &mut back.as_mut_slice().into(), 0);
        }
        (back, scale)
    }

    #[test]
    fn errors_stay_within_the_bounds() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        for magnitude in [1e-37f32, 1e-20, 1e-3, 1.0, 7.3, 1e4, 1e30, f32::MAX] {
            let row: Vec<f32> = (0..64).map(|_| random() * magnitude).collect();
            for dtype in QUANTISED {
                let (back, scale) = round_trip(dtype, &row);
                for (&value, &back) in row.iter().zip(&back) {
                    let bound = match dtype {
                        Dtype::Fp8E4M3 => (value.abs() / 16.0).max(scale / 1024.0),
                        Dtype::Fp8E5M2 => (value.abs() / 8.0).max(scale / 131072.0),
                        _ => scale / 2.0,
                    };
                    // Scaling and its inverse round once each.
                    let error = (f64::from(value) - f64::from(back)).abs();
                    let slack = f64::from(value.abs()) * 1e-6 + 1e-44;
                    assert!(
                        error <= f64::from(bound) + slack,
                        "{dtype} {value:e} -> {back:e} (scale {scale:e})"
                    );
                }
            }
        }
    }

    #[test]
    fn int8_rounds_to_even_and_saturates() {
        for value in
            [-1e9, -127.6, -127.5, -127.0, -2.5, -1.5, -0.5, -0.0, 0.5, 0.500_001, 1.5, 2.5, 126.5, 1e9]
        {
            assert_eq!(int8(value), value.round_ties_even().clamp(-127.0, 127.0) as i8, "{value}");
        }
        assert_eq!(int8(f32::NAN), 0);
        assert_eq!(int8(f32::NEG_INFINITY), -127);
    }

    #[test]
    fn odd_values_survive() {
        for dtype in QUANTISED {
            assert_eq!(round_trip(dtype, &[0.0; 4]).0, [0.0; 4]);
            let (back, scale) = round_trip(dtype, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2.0]);
            assert!(scale.is_normal());
            if dtype == Dtype::Int8 {
                assert_eq!(back[0], 0.0);
            } else {
                assert!(back[0].is_nan());
            }
            assert!((back[1] - 2.0).abs() < 1e-5 && (back[2] + 2.0).abs() < 1e-5, "{back:?}");
            assert!((back[3] - 2.0).abs() < 1e-5);
            // Subnormal rows lose their values, but do not become NaN.
            assert!(round_trip(dtype, &[1e-44, -1e-45]).0.iter().all(|value| value.abs() < 1e-40));
        }
    }
}
