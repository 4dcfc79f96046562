//! The converters alone: every f16, every bf16, every code, every midpoint, and millions of f32.

use half::{bf16, f16};

use kvpool::Dtype;
use kvpool_cuda_tests::host::{decode, encode, narrow, widen};
use kvpool_testkit::rng::Rng;
use kvpool_testkit::scalar;

const CODES: [Dtype; 3] = [Dtype::Fp8E4M3, Dtype::Fp8E5M2, Dtype::Int8];

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[track_caller]
fn check_codes(dtype: Dtype, values: &[f32]) {
    for (value, code) in values.iter().zip(encode(dtype, values)) {
        assert_eq!(code, scalar::encode(dtype, *value), "{dtype} of {value:e} ({:#x})", value.to_bits());
    }
}

#[test]
fn every_code_has_its_value() {
    let codes: Vec<u8> = (0..=255).collect();
    for dtype in CODES {
        for (code, value) in codes.iter().zip(decode(dtype, &codes)) {
            let want = scalar::decode(dtype, *code);
            assert!(same(value, want), "{dtype} {code:#x} is {value}, not {want}");
        }
    }
}

#[test]
fn every_half_widens_as_it_should() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for (bits, value) in bits.iter().zip(widen(Dtype::F16, &bits)) {
        assert!(same(value, f16::from_bits(*bits).to_f32()), "f16 {bits:#x} is {value}");
    }
    for (bits, value) in bits.iter().zip(widen(Dtype::Bf16, &bits)) {
        assert!(same(value, bf16::from_bits(*bits).to_f32()), "bf16 {bits:#x} is {value}");
    }
}

#[test]
fn every_half_has_its_code() {
    for bits in 0..=u16::MAX {
        let values = [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()];
        CODES.iter().for_each(|&dtype| check_codes(dtype, &values));
    }
}

/// The hardest cases for rounding: midpoints between neighbouring codes, and the adjacent floats.
#[test]
fn midpoints_go_to_even() {
    for dtype in CODES {
        let codes: Vec<u8> = (0..=255).collect();
        let mut values: Vec<f32> = decode(dtype, &codes).into_iter().filter(|v| v.is_finite()).collect();
        values.sort_by(f32::total_cmp);
        let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let around: Vec<f32> =
            middles.flat_map(|middle| [middle.next_down(), middle, middle.next_up()]).collect();
        check_codes(dtype, &around);
    }
}

fn random_floats(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = Rng(seed);
    let mut any = || {
        let bits = rng.bits();
        // Random bits, or a value in the range in which codes differ.
        if bits >> 63 == 0 { f32::from_bits(bits as u32) } else { (bits as i32) as f32 / (1 << 22) as f32 }
    };
    (0..count).map(|_| any()).collect()
}

#[test]
fn random_floats_have_their_codes() {
    for dtype in CODES {
        check_codes(dtype, &random_floats(3, if cfg!(debug_assertions) { 100_000 } else { 2_000_000 }));
    }
}

#[test]
fn random_floats_narrow_to_the_nearest() {
    let mut values = random_floats(4, if cfg!(debug_assertions) { 500_000 } else { 4_000_000 });
    // Midpoints of f16 and the adjacent floats, subnormals and the largest included.
    for bits in 0..0x7C00u16 {
        let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        let middle = if high.is_finite() { (low + high) / 2.0 } else { 65520.0 };
        values.extend([middle.next_down(), middle, middle.next_up(), -middle]);
    }
    for (value, bits) in values.iter().zip(narrow(Dtype::F16, &values)) {
        let (got, want) = (f16::from_bits(bits), f16::from_f32(*value));
        assert!(
            got == want && got.is_sign_negative() == want.is_sign_negative()
                || (got.is_nan() && want.is_nan()),
            "{value:e}"
        );
    }
    for (value, bits) in values.iter().zip(narrow(Dtype::Bf16, &values)) {
        let (got, want) = (bf16::from_bits(bits), bf16::from_f32(*value));
        assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{value:e}");
    }
}
