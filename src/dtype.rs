//! Element types of K and V, by name and size. What their bits mean is `storage`'s affair.

use std::fmt;

/// What one element of K or V is kept as.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    #[default]
    Bf16,
    /// OCP E4M3: four exponent bits, no infinity, largest value 448.
    Fp8E4M3,
    /// OCP E5M2: five exponent bits, largest finite value 57344.
    Fp8E5M2,
    /// A signed integer, -127 to 127, times a scale.
    Int8,
}

impl Dtype {
    /// Every type, for tables and tests.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8E4M3, Self::Fp8E5M2, Self::Int8];

    /// Bytes of one element.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4M3 | Self::Fp8E5M2 | Self::Int8 => 1,
        }
    }

    /// Whether values are turned into codes on store, so that a store takes f32, f16 and bf16 too.
    #[inline]
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::Fp8E4M3 | Self::Fp8E5M2 | Self::Int8)
    }

    /// The name that [`FromStr`](std::str::FromStr) reads back.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4M3 => "fp8_e4m3",
            Self::Fp8E5M2 => "fp8_e5m2",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
