//! The kernels as host functions: by name, with the same parameter struct as for a launch on a
//! device.
//!
//! CTAs run on the calling thread. [`Order`] determines the order of a launch's CTAs and of a CTA's
//! threads.

use std::ffi::{CString, c_char, c_uint, c_void};

use kvpool::Dtype;
use kvpool_cuda::params::{THREADS, code_type, row_type};

/// Order of a launch's CTAs, and of a CTA's threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order(c_uint);

impl Order {
    /// In numerical order.
    pub const ASCENDING: Self = Self(0);
    /// In reverse order, for CTAs and for threads.
    pub const DESCENDING: Self = Self(3);

    /// CTAs shuffled by `seed`; threads in reverse order for odd seeds.
    #[must_use]
    pub fn shuffled(seed: u32) -> Self {
        Self((seed & 0xFF_FFFF) << 3 | 4 | (seed & 1))
    }
}

unsafe extern "C" {
    fn kvp_host_find(name: *const c_char) -> *const c_void;
    fn kvp_host_parameter_bytes(kernel: *const c_void) -> c_uint;
    fn kvp_host_launch(
        name: *const c_char,
        ctas: c_uint,
        threads: c_uint,
        arguments: *mut *mut c_void,
        order: c_uint,
    ) -> i32;
    fn kvp_host_encode(code: c_uint, values: *const f32, codes: *mut u8, n: usize);
    fn kvp_host_decode(code: c_uint, codes: *const u8, values: *mut f32, n: usize);
    fn kvp_host_widen(row: c_uint, bits: *const u16, values: *mut f32, n: usize);
    fn kvp_host_narrow(row: c_uint, values: *const f32, bits: *mut u16, n: usize);
}

/// Runs a kernel on `ctas` CTAs.
///
/// # Panics
/// If no kernel has this name, or its parameter struct has another size.
///
/// # Safety
/// The requirements of [`kvpool_cuda::params`] on a launch; addresses are those of this process.
pub unsafe fn launch<P: Copy>(kernel: &str, ctas: u32, params: P, order: Order) {
    // SAFETY: the caller's promise.
    unsafe { launch_with(kernel, ctas, THREADS, params, order) }
}

/// Runs a kernel on `ctas` CTAs of `threads` threads.
///
/// # Panics
/// As [`launch`].
///
/// # Safety
/// As for [`launch`]; the kernel allows this number of threads.
pub unsafe fn launch_with<P: Copy>(kernel: &str, ctas: u32, threads: u32, mut params: P, order: Order) {
    let name = CString::new(kernel).expect("the name contains no NUL");
    // SAFETY: a NUL-terminated string.
    let found = unsafe { kvp_host_find(name.as_ptr()) };
    assert!(!found.is_null(), "no kernel is named {kernel}");
    // SAFETY: found above.
    let bytes = unsafe { kvp_host_parameter_bytes(found) } as usize;
    assert_eq!(bytes, size_of::<P>(), "size of the parameters of {kernel}");
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: the one struct that the kernel takes; its contents are the caller's promise.
    let code = unsafe { kvp_host_launch(name.as_ptr(), ctas, threads, arguments.as_mut_ptr(), order.0) };
    assert_eq!(code, 0, "launch of {kernel}");
}

fn code(dtype: Dtype) -> c_uint {
    code_type(dtype).unwrap_or_else(|| panic!("{dtype} is not quantised"))
}

fn row(dtype: Dtype) -> c_uint {
    assert_eq!(dtype.bytes(), 2, "{dtype} does not have 16 bits");
    row_type(dtype).expect("the type can be converted")
}

/// Returns the codes of values, by the kernels' software conversion.
#[must_use]
pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut codes = vec![0; values.len()];
    // SAFETY: as many codes as values.
    unsafe { kvp_host_encode(code(dtype), values.as_ptr(), codes.as_mut_ptr(), values.len()) };
    codes
}

/// Returns the values of codes.
#[must_use]
pub fn decode(dtype: Dtype, codes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    // SAFETY: as many values as codes.
    unsafe { kvp_host_decode(code(dtype), codes.as_ptr(), values.as_mut_ptr(), codes.len()) };
    values
}

/// Converts f16 or bf16 to f32.
#[must_use]
pub fn widen(dtype: Dtype, bits: &[u16]) -> Vec<f32> {
    let mut values = vec![0.0; bits.len()];
    // SAFETY: as many values as elements.
    unsafe { kvp_host_widen(row(dtype), bits.as_ptr(), values.as_mut_ptr(), bits.len()) };
    values
}

/// Converts f32 to f16 or bf16.
#[must_use]
pub fn narrow(dtype: Dtype, values: &[f32]) -> Vec<u16> {
    let mut bits = vec![0; values.len()];
    // SAFETY: as many elements as values.
    unsafe { kvp_host_narrow(row(dtype), values.as_ptr(), bits.as_mut_ptr(), values.len()) };
    bits
}
