//! A caller's K or V rows, as a view of typed bytes.

use half::{bf16, f16};

use crate::dtype::Dtype;
use crate::error::{LayoutError, StorageError};

impl std::str::FromStr for Dtype {
    type Err = LayoutError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| LayoutError::UnknownDtype { name: name.to_owned() })
    }
}

/// Rows of K or V that a store reads: elements of one type, `[tokens][heads][head_dim]`, row-major and contiguous.
/// The bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

/// Rows of K or V that a load writes; see [`Elements`].
#[derive(Debug)]
pub struct ElementsMut<'a> {
    dtype: Dtype,
    bytes: &'a mut [u8],
}

impl<'a> Elements<'a> {
    /// Elements of any type as bytes; how 8-bit floats and foreign buffers come in.
    ///
    /// # Errors
    /// [`StorageError::PartialElement`] if the bytes are no whole number of elements.
    pub fn new(dtype: Dtype, bytes: &'a [u8]) -> Result<Self, StorageError> {
        whole_elements(dtype, bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// No elements: V of a layout that keeps one latent plane a layer.
    pub const fn none() -> Self {
        Self { dtype: Dtype::F32, bytes: &[] }
    }

    /// The type of the elements.
    #[inline]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How many elements.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// Whether there are none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements as bytes, in the machine's byte order.
    #[inline]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> ElementsMut<'a> {
    /// Room for elements of any type, as bytes.
    ///
    /// # Errors
    /// [`StorageError::PartialElement`] if the bytes are no whole number of elements.
    pub fn new(dtype: Dtype, bytes: &'a mut [u8]) -> Result<Self, StorageError> {
        whole_elements(dtype, bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// Room for nothing: V of a layout that keeps one latent plane a layer.
    pub const fn none() -> Self {
        Self { dtype: Dtype::F32, bytes: &mut [] }
    }

    /// The same room as a shared view.
    #[inline]
    pub const fn as_elements(&self) -> Elements<'_> {
        Elements { dtype: self.dtype, bytes: self.bytes }
    }

    /// The elements as bytes, in the machine's byte order.
    #[inline]
    pub const fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

fn whole_elements(dtype: Dtype, bytes: usize) -> Result<(), StorageError> {
    if bytes.is_multiple_of(dtype.bytes()) {
        Ok(())
    } else {
        Err(StorageError::PartialElement { dtype, bytes })
    }
}

macro_rules! elements {
    ($($native:ty => $dtype:expr),* $(,)?) => {$(
        impl<'a> From<&'a [$native]> for Elements<'a> {
            #[inline]
            fn from(values: &'a [$native]) -> Self {
                // SAFETY: the element type is plain data without padding; the length is that of the slice in bytes.
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
