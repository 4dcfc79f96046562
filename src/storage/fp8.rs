//! 8-bit floats (OCP 8-bit Floating Point Specification): E4M3 and E5M2.
//!
//! | format | sign | exponent | mantissa | bias | largest finite | NaN | infinity |
//! |---|---|---|---|---|---|---|---|
//! | E4M3 | 1 | 4 | 3 | 7 | `0x7E` = 448 | `0x7F`, `0xFF` | none |
//! | E5M2 | 1 | 5 | 2 | 15 | `0x7B` = 57344 | `0x7D..=0x7F`, `0xFD..=0xFF` | `0x7C`, `0xFC` |
//!
//! Encoding rounds to nearest, ties to even, and saturates, infinities included. NaN becomes one
//! positive NaN code, because arithmetic does not reliably preserve its sign. For all other values
//! the device's conversion instructions (`cvt.rn.satfinite`) give the same codes. f16 and bf16 are
//! converted through f32, which is exact. Encoding is branch-free integer arithmetic, so loops over
//! it can be vectorized. Decoding is a table look-up.

pub(super) struct Format {
    mantissa_bits: u32,
    bias: i32,
    /// Code of the largest finite value.
    max: u8,
    nan: u8,
    /// Whether the codes above `max` begin with an infinity.
    infinity: bool,
}

pub(super) const E4M3: Format = Format { mantissa_bits: 3, bias: 7, max: 0x7E, nan: 0x7F, infinity: false };
pub(super) const E5M2: Format = Format { mantissa_bits: 2, bias: 15, max: 0x7B, nan: 0x7E, infinity: true };

pub(super) static E4M3_VALUES: [f32; 256] = E4M3.table();
pub(super) static E5M2_VALUES: [f32; 256] = E5M2.table();

pub(super) const E4M3_MAX: f32 = E4M3.decode(E4M3.max);
pub(super) const E5M2_MAX: f32 = E5M2.decode(E5M2.max);

const F32_MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;
const F32_BIAS: i32 = f32::MAX_EXP - 1;

/// Returns 2^exponent, for exponents of normal numbers.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + F32_BIAS) as u32) << F32_MANTISSA_BITS)
}

impl Format {
    /// Returns the code of the nearest value: ties to the even code, saturating.
    #[inline(always)]
    pub(super) const fn encode(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let sign = (bits >> 24) as u8 & 0x80;
        let magnitude = bits & 0x7FFF_FFFF;

        // Normal: add just under half a step, plus the lowest kept bit for ties, then truncate. A
        // carry into the exponent is correct.
        let cut = F32_MANTISSA_BITS - self.mantissa_bits;
        let even = (magnitude >> cut) & 1;
        let rounded = magnitude.wrapping_add((1 << (cut - 1)) - 1 + even) >> cut;
        let normal = rounded.wrapping_sub(((F32_BIAS - self.bias) as u32) << self.mantissa_bits);

        // Subnormal: adding a power of two whose last place is one subnormal step makes the adder
        // round.
        let smallest_exponent = 1 - self.bias;
        let magic = power_of_two(smallest_exponent - self.mantissa_bits as i32 + F32_MANTISSA_BITS as i32);
        let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(magic.to_bits());

        let code = if magnitude < power_of_two(smallest_exponent).to_bits() { subnormal } else { normal };
        let finite = if code > self.max as u32 { self.max } else { code as u8 };
        if magnitude > f32::INFINITY.to_bits() { self.nan } else { sign | finite }
    }

    const fn decode(&self, code: u8) -> f32 {
        let magnitude = code & 0x7F;
        let value = if magnitude > self.max {
            if self.infinity && magnitude == self.max + 1 { f32::INFINITY } else { f32::NAN }
        } else {
            let exponent = (magnitude >> self.mantissa_bits) as i32;
            let mantissa = (magnitude & ((1 << self.mantissa_bits) - 1)) as f32;
            let step = 1 - self.bias - self.mantissa_bits as i32;
            if exponent == 0 {
                mantissa * power_of_two(step)
            } else {
                (mantissa + (1 << self.mantissa_bits) as f32) * power_of_two(step + exponent - 1)
            }
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    const fn table(&self) -> [f32; 256] {
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            values[code] = self.decode(code as u8);
            code += 1;
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Finds the nearest finite value by search, ties to the even code; independent of `encode`.
    fn nearest(values: &[f32; 256], value: f32) -> f32 {
        if value.is_nan() {
            return f32::NAN;
        }
        let mut best = (f64::INFINITY, 0u8);
        for code in (0..=0x7Fu8).filter(|&code| values[code as usize].is_finite()) {
            let distance = (f64::from(values[code as usize]) - f64::from(value.abs().min(1e9))).abs();
            if distance < best.0 || (distance == best.0 && code & 1 == 0) {
                best = (distance, code);
            }
        }
        values[best.1 as usize].copysign(value)
    }

    fn same(a: f32, b: f32) -> bool {
        (a.is_nan() && b.is_nan()) || a.to_bits() == b.to_bits()
    }

    fn check(format: &Format, values: &[f32; 256], value: f32) {
        let got = values[format.encode(value) as usize];
        let want = nearest(values, value);
        assert!(same(got, want), "{value:e}: got {got:e}, nearest is {want:e}");
    }

    #[test]
    fn every_code_is_a_fixed_point() {
        for (format, values) in [(&E4M3, &E4M3_VALUES), (&E5M2, &E5M2_VALUES)] {
            for code in 0..=255u8 {
                let value = values[code as usize];
                if value.is_finite() {
                    assert_eq!(format.encode(value), code, "{value:e}");
                } else if value.is_infinite() {
                    assert_eq!(format.encode(value), format.max | code & 0x80);
                } else {
                    assert_eq!(format.encode(value), format.nan);
                    assert!(values[format.encode(value) as usize].is_nan());
                }
            }
        }
    }

    #[test]
    fn known_values() {
        assert_eq!((E4M3_MAX, E5M2_MAX), (448.0, 57344.0));
        assert_eq!(E4M3_VALUES[1], 1.0 / 512.0);
        assert_eq!(E5M2_VALUES[1], 1.0 / 65536.0);
        assert_eq!(E4M3_VALUES[0x38], 1.0);
        assert_eq!(E5M2_VALUES[0x3C], 1.0);
        assert_eq!(E4M3_VALUES.iter().filter(|v| v.is_nan()).count(), 2);
        assert_eq!(E5M2_VALUES.iter().filter(|v| v.is_nan()).count(), 6);
        assert_eq!(E5M2_VALUES.iter().filter(|v| v.is_infinite()).count(), 2);
        assert_eq!(E4M3.encode(f32::INFINITY), 0x7E);
        assert_eq!(E4M3.encode(-465.0), 0xFE);
        assert_eq!(E5M2.encode(f32::NEG_INFINITY), 0xFB);
        assert_eq!(E4M3.encode(-0.0), 0x80);
    }

    #[test]
    fn every_half_rounds_to_the_nearest() {
        let step = if cfg!(miri) { 2501 } else { 1 };
        for bits in (0..=u16::MAX).step_by(step) {
            for value in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
                check(&E4M3, &E4M3_VALUES, value);
                check(&E5M2, &E5M2_VALUES, value);
            }
        }
    }

    /// Rounding errors appear first at midpoints between values, and the floats next to them.
    #[test]
    fn midpoints_go_to_even() {
        for (format, values) in [(&E4M3, &E4M3_VALUES), (&E5M2, &E5M2_VALUES)] {
            for code in (0..format.max).step_by(if cfg!(miri) { 9 } else { 1 }) {
                let middle = (values[code as usize] + values[code as usize + 1]) / 2.0;
                for value in [middle.next_down(), middle, middle.next_up()] {
                    check(format, values, value);
                    check(format, values, -value);
                }
            }
        }
    }
}
