//! The kernels: loaded once per device, launched with their parameter structs.
//!
//! Their code is in the repository as PTX, for the two oldest architectures that make a difference
//! to it. The driver compiles it for the device, and caches the result. All kernels iterate over
//! their work with the grid size as stride, so that any grid size is correct: it only determines
//! how much of the device a launch may use.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUstream};

use crate::dtype::Dtype;
use crate::error::StorageError;

use super::context::Context;
use super::params::THREADS;
use super::version::Version;

/// NUL-terminated, as the driver requires.
const PTX_SM80: &str = concat!(include_str!("../../kernels/ptx/kvpool.sm80.ptx"), "\0");
const PTX_SM90: &str = concat!(include_str!("../../kernels/ptx/kvpool.sm90.ptx"), "\0");

/// First architecture with instructions for conversions to and from 8 bits.
const SM90: Version = Version { major: 9, minor: 0 };

const CODES: [(Dtype, &str); 3] = [(Dtype::Fp8E4M3, "e4m3"), (Dtype::Fp8E5M2, "e5m2"), (Dtype::Int8, "int8")];
const ROWS: [(Dtype, &str); 3] = [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16"), (Dtype::F32, "f32")];

/// A kernel; see [`params`](super::params) for its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kernel {
    Copy,
    Zero,
    Pack,
    Unpack,
    Store,
    Load,
    Patch,
    /// Converts rows of the second type to codes of the first.
    Quantise(Dtype, Dtype),
    /// Converts codes of the first type to rows of the second.
    Dequantise(Dtype, Dtype),
}

const PLAIN: [(Kernel, &str); 7] = [
    (Kernel::Copy, "copy"),
    (Kernel::Zero, "zero"),
    (Kernel::Pack, "pack"),
    (Kernel::Unpack, "unpack"),
    (Kernel::Store, "store"),
    (Kernel::Load, "load"),
    (Kernel::Patch, "patch"),
];

/// The loaded kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    module: CUmodule,
    functions: Vec<(Kernel, CUfunction)>,
}

// SAFETY: any thread can use modules and functions, and several can at once.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub(super) fn load(context: Arc<Context>, capability: Version) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let ptx = if capability >= SM90 { PTX_SM90 } else { PTX_SM80 };
        let mut module = std::ptr::null_mut();
        // SAFETY: the pointer is valid, the text ends in a NUL, and the context is current.
        let loaded = unsafe { sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()) };
        context.check(loaded, "loading the kernels")?;
        let mut kernels = Self { context: context.clone(), module, functions: Vec::new() };
        for (kernel, name) in named() {
            let mut function = std::ptr::null_mut();
            // SAFETY: the pointer is valid, the module is loaded, and the name ends in a NUL.
            let found = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
            context.check(found, "finding a kernel")?;
            // The driver loads code at the first query, and may wait for the whole device to do so.
            // Do that now and not at the first launch, which may be part of a graph being captured.
            let (mut threads, which) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
            // SAFETY: the pointer is valid and the function was found.
            let asked = unsafe { sys::cuFuncGetAttribute(&mut threads, which, function) };
            context.check(asked, "loading a kernel")?;
            kernels.functions.push((kernel, function));
        }
        Ok(kernels)
    }

    /// Enqueues a launch of `grid` CTAs.
    ///
    /// # Safety
    /// The stream lives and is of this device. The parameters are the kernel's own struct, and meet
    /// the requirements of [`params`](super::params) until the launch is complete.
    pub(super) unsafe fn launch<P: DeviceRepr>(
        &self,
        kernel: Kernel,
        grid: u32,
        stream: CUstream,
        params: &P,
    ) -> Result<(), StorageError> {
        let found = self.functions.iter().find(|(has, _)| *has == kernel);
        let function = found.expect("all kernels are loaded").1;
        let _entered = self.context.enter()?;
        let mut arguments = [(&raw const *params).cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded and takes one struct, which the driver copies during the
        // call; the rest is the caller's promise.
        let launched = unsafe {
            let (start, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function, grid.max(1), 1, 1, THREADS, 1, 1, 0, stream, start, none)
        };
        self.context.check(launched, "launching a kernel")
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _entered = self.context.enter_anyhow();
        // SAFETY: the module was loaded, and no one has its functions any more. The driver waits
        // for their launches.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Returns every kernel with its name in the module.
fn named() -> impl Iterator<Item = (Kernel, CString)> {
    let plain = PLAIN.into_iter().map(|(kernel, name)| (kernel, format!("kvp_{name}")));
    let pairs = CODES.into_iter().flat_map(|code| ROWS.into_iter().map(move |row| (code, row)));
    let converting = pairs.flat_map(|((code, code_name), (row, row_name))| {
        [
            (Kernel::Quantise(code, row), format!("kvp_quantise_{code_name}_{row_name}")),
            (Kernel::Dequantise(code, row), format!("kvp_dequantise_{code_name}_{row_name}")),
        ]
    });
    plain
        .chain(converting)
        .map(|(kernel, name)| (kernel, CString::new(name).expect("the name contains no NUL")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_both_modules() {
        for ptx in [PTX_SM80, PTX_SM90] {
            for (kernel, name) in named() {
                let entry = format!(".entry {}(", name.to_str().unwrap());
                assert!(ptx.contains(&entry), "{kernel:?}: no {entry}");
            }
            assert_eq!(ptx.find('\0'), Some(ptx.len() - 1));
        }
        assert_eq!(named().count(), 7 + 2 * 9);
    }
}
