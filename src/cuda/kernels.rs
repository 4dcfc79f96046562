//! The kernels: loaded once a device, launched by their struct of parameters.
//!
//! Their code lies in the repository as PTX, for the two oldest architectures that differ to them; the driver compiles it
//! for the device, and keeps what it made in its own cache. All kernels go over their work with the grid as stride, so
//! that any grid is right: a grid says how much of the device a launch may take.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUstream};

use crate::dtype::Dtype;
use crate::error::StorageError;

use super::context::Context;
use super::params::THREADS;
use super::version::Version;

/// The driver reads to the NUL.
const PTX_SM80: &str = concat!(include_str!("../../kernels/ptx/kvpool.sm80.ptx"), "\0");
const PTX_SM90: &str = concat!(include_str!("../../kernels/ptx/kvpool.sm90.ptx"), "\0");

/// Where the conversions to and from 8 bits are instructions.
const SM90: Version = Version { major: 9, minor: 0 };

const CODES: [(Dtype, &str); 3] = [(Dtype::Fp8E4M3, "e4m3"), (Dtype::Fp8E5M2, "e5m2"), (Dtype::Int8, "int8")];
const ROWS: [(Dtype, &str); 3] = [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16"), (Dtype::F32, "f32")];

/// A kernel; see [`params`](super::params).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kernel {
    Copy,
    Zero,
    Pack,
    Unpack,
    Store,
    Load,
    Patch,
    /// Rows of the second type to codes of the first.
    Quantise(Dtype, Dtype),
    /// And back.
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

/// The kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    module: CUmodule,
    functions: Vec<(Kernel, CUfunction)>,
}

// SAFETY: modules and functions may be used by any thread, and by several at once.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub(super) fn load(context: Arc<Context>, capability: Version) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let ptx = if capability >= SM90 { PTX_SM90 } else { PTX_SM80 };
        let mut module = std::ptr::null_mut();
        // SAFETY: the place is valid, the text ends in a NUL, and the context is current.
        let loaded = unsafe { sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()) };
        context.check(loaded, "loading the kernels")?;
        let mut kernels = Self { context: context.clone(), module, functions: Vec::new() };
        for (kernel, name) in named() {
            let mut function = std::ptr::null_mut();
            // SAFETY: the place is valid, the module is loaded, and the name ends in a NUL.
            let found = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
            context.check(found, "looking for a kernel")?;
            // The driver loads code when it is first asked about, for which it may wait for the whole device: now, and not at the
            // first launch, which may stand in somebody's graph.
            let (mut threads, which) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
            // SAFETY: the place is valid and the function was found.
            let asked = unsafe { sys::cuFuncGetAttribute(&mut threads, which, function) };
            context.check(asked, "loading a kernel")?;
            kernels.functions.push((kernel, function));
        }
        Ok(kernels)
    }

    /// Enqueues a launch of `grid` CTAs.
    ///
    /// # Safety
    /// The stream lives and is of this device; the parameters are the kernel's own struct, and keep what
    /// [`params`](super::params) asks for, until the launch is over.
    pub(super) unsafe fn launch<P: DeviceRepr>(
        &self,
        kernel: Kernel,
        grid: u32,
        stream: CUstream,
        params: &P,
    ) -> Result<(), StorageError> {
        let found = self.functions.iter().find(|(has, _)| *has == kernel);
        let function = found.expect("all kernels were loaded").1;
        let _entered = self.context.enter()?;
        let mut arguments = [(&raw const *params).cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded and takes one struct, which the driver copies now; the rest is the caller's.
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
        // SAFETY: it was loaded, and nobody has its functions any more. The driver waits for launches of them.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Every kernel, and what it is called in the module.
fn named() -> impl Iterator<Item = (Kernel, CString)> {
    let plain = PLAIN.into_iter().map(|(kernel, name)| (kernel, format!("kvp_{name}")));
    let pairs = CODES.into_iter().flat_map(|code| ROWS.into_iter().map(move |row| (code, row)));
    let converting = pairs.flat_map(|((code, code_name), (row, row_name))| {
        [
            (Kernel::Quantise(code, row), format!("kvp_quantise_{code_name}_{row_name}")),
            (Kernel::Dequantise(code, row), format!("kvp_dequantise_{code_name}_{row_name}")),
        ]
    });
    plain.chain(converting).map(|(kernel, name)| (kernel, CString::new(name).expect("names have no NUL")))
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
