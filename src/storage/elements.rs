use half::{bf16, f16};

use crate::dtype::Dtype;
use crate::error::{Invalid, StorageError};

impl std::str::FromStr for Dtype {
    type Err = Invalid;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Invalid::new("element type", format_args!("{name:?}"), format_args!("one of {known}"))
        })
    }
}

/// Rows of K or V to store: elements of one type, `[tokens][heads][head_dim]`, row-major and
/// contiguous. The bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

/// Buffer for rows of K or V to load; see [`Elements`].
#[derive(Debug)]
pub struct ElementsMut<'a> {
    dtype: Dtype,
    bytes: &'a mut [u8],
}

impl<'a> Elements<'a> {
    /// Views bytes as elements of any type. Fails if they are not a whole number of elements.
    pub fn new(dtype: Dtype, bytes: &'a [u8]) -> Result<Self, StorageError> {
        whole_elements(dtype, bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// Returns an empty view, for the V of a layout with one latent plane per layer.
    pub const fn none() -> Self {
        Self { dtype: Dtype::F32, bytes: &[] }
    }

    /// Returns the type of the elements.
    #[inline]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the number of elements.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// Returns true if there are no elements.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the elements as bytes, in the machine's byte order.
    #[inline]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> ElementsMut<'a> {
    /// Views a buffer of bytes as elements of any type, or fails like [`Elements::new`].
    pub fn new(dtype: Dtype, bytes: &'a mut [u8]) -> Result<Self, StorageError> {
        whole_elements(dtype, bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// Returns an empty buffer, for the V of a layout with one latent plane per layer.
    pub const fn none() -> Self {
        Self { dtype: Dtype::F32, bytes: &mut [] }
    }

    /// Returns a shared view of the buffer.
    #[inline]
    pub const fn as_elements(&self) -> Elements<'_> {
        Elements { dtype: self.dtype, bytes: self.bytes }
    }

    /// Returns the elements as bytes, in the machine's byte order.
    #[inline]
    pub const fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

fn whole_elements(dtype: Dtype, bytes: usize) -> Result<(), StorageError> {
    if bytes.is_multiple_of(dtype.bytes()) {
        return Ok(());
    }
    let limit = format_args!("a multiple of {}, the bytes of {dtype}", dtype.bytes());
    Err(Invalid::new("bytes", bytes, limit).into())
}

macro_rules! elements {
    ($($native:ty => $dtype:expr),* $(,)?) => {$(
        impl<'a> From<&'a [$native]> for Elements<'a> {
            #[inline]
            fn from(values: &'a [$native]) -> Self {
                // SAFETY: the element type is plain data without padding; the length is the slice's
                // in bytes.
                let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
                Self { dtype: $dtype, bytes }
            }
        }

        impl<'a> From<&'a Vec<$native>> for Elements<'a> {
            #[inline]
            fn from(values: &'a Vec<$native>) -> Self {
                values.as_slice().into()
            }
        }

        impl<'a> From<&'a mut [$native]> for ElementsMut<'a> {
            #[inline]
            fn from(values: &'a mut [$native]) -> Self {
                let (values, len) = (values.as_mut_ptr(), size_of_val(values));
                // SAFETY: as above, and every bit pattern is a value of the element type.
                let bytes = unsafe { std::slice::from_raw_parts_mut(values.cast(), len) };
                Self { dtype: $dtype, bytes }
            }
        }

        impl<'a> From<&'a mut Vec<$native>> for ElementsMut<'a> {
            #[inline]
            fn from(values: &'a mut Vec<$native>) -> Self {
                values.as_mut_slice().into()
            }
        }
    )*};
}

elements! { f32 => Dtype::F32, f16 => Dtype::F16, bf16 => Dtype::Bf16, i8 => Dtype::Int8 }

mod sealed {
    pub trait Sealed {}
}

/// Native type of elements that are accessed in place.
///
/// | type | dtype |
/// |---|---|
/// | `f32`, [`f16`](struct@f16), [`bf16`] | the float of that name |
/// | `u8` | the bits of an [`Fp8E4M3`](Dtype::Fp8E4M3) or [`Fp8E5M2`](Dtype::Fp8E5M2) |
/// | `i8` | the code of an [`Int8`](Dtype::Int8) |
///
/// The value of a code is the code times its scale: see [`Scales`](super::Scales).
pub trait Element: sealed::Sealed + Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static {
    /// Name of the type, for errors.
    const NAME: &'static str;

    /// Returns whether this type holds elements of that dtype.
    fn holds(dtype: Dtype) -> bool;
}

macro_rules! native {
    ($($native:ty => $($dtype:ident)|+),* $(,)?) => {$(
        impl sealed::Sealed for $native {}
        impl Element for $native {
            const NAME: &'static str = stringify!($native);

            #[inline]
            fn holds(dtype: Dtype) -> bool {
                matches!(dtype, $(Dtype::$dtype)|+)
            }
        }
    )*};
}

native! { f32 => F32, f16 => F16, bf16 => Bf16, u8 => Fp8E4M3 | Fp8E5M2, i8 => Int8 }
