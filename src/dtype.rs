//! Element types of K and V, by name and size. The `storage` floor interprets their bits.

use std::fmt;

/// Type of an element of K or V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// Upper half of a binary32.
    #[default]
    Bf16,
    /// OCP E4M3: four exponent bits, no infinity, largest value 448.
    Fp8E4M3,
    /// OCP E5M2: five exponent bits, largest finite value 57344.
    Fp8E5M2,
    /// Signed integer, -127 to 127, times a scale.
    Int8,
}

impl Dtype {
    /// Every type, for tables and tests.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8E4M3, Self::Fp8E5M2, Self::Int8];

    /// Returns the size of one element in bytes.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4M3 | Self::Fp8E5M2 | Self::Int8 => 1,
        }
    }

    /// Returns whether stores quantise their values, and so accept f32, f16 and bf16, too.
    #[inline]
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::Fp8E4M3 | Self::Fp8E5M2 | Self::Int8)
    }

    /// Returns the name that [`FromStr`](std::str::FromStr) parses.
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
