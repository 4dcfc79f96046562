//! The kernels: loaded once per device, launched with their parameter structs.
//!
//! Their code is in the repository as PTX, for the two oldest architectures that make a difference
//! to it. The driver compiles it for the device, and caches the result. A program built with `--cfg
//! kvpool_cubins` also contains machine code, made by `kernels/cubins.sh`, which needs no
//! compilation:
//!
//! ```text
//! machine code for the device's major version ──the driver refuses it, or there is none──> PTX
//! ```
//!
//! All kernels iterate over their work with the grid size as stride, so that any grid size is
//! correct: it only determines how much of the device a launch may use.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{
    self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule, CUresult, CUstream,
};

use kvpool::StorageError;

use super::context::Context;
use super::driver::DeviceInfo;
use super::launch::{Choices, Kernel, Params, Rule, Shape, Work};
use super::params::BULK_SHARED_BYTES;
use super::version::Version;

/// NUL-terminated, as the driver requires.
const PTX_SM80: &str = concat!(include_str!("../ptx/kvpool.sm80.ptx"), "\0");
const PTX_SM90: &str = concat!(include_str!("../ptx/kvpool.sm90.ptx"), "\0");

/// Machine code by the major version of the compute capability on which it runs.
#[cfg(kvpool_cubins)]
const CUBINS: [(u32, &Aligned<[u8]>); 2] = [
    (8, &Aligned(*include_bytes!(concat!(env!("KVPOOL_CUBINS"), "/kvpool.sm80.cubin")))),
    (9, &Aligned(*include_bytes!(concat!(env!("KVPOOL_CUBINS"), "/kvpool.sm90.cubin")))),
];
#[cfg(not(kvpool_cubins))]
const CUBINS: [(u32, &Aligned<[u8]>); 0] = [];

/// The driver reads 64-bit fields of an image in place.
#[repr(align(16))]
struct Aligned<T: ?Sized>(T);

/// The form in which a device's kernels were loaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum KernelImage {
    /// Machine code, which was built with the program.
    Cubin,
    /// PTX, which the driver has compiled, or found in its cache.
    Ptx,
}

impl fmt::Display for KernelImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cubin => "machine code",
            Self::Ptx => "PTX",
        })
    }
}

/// Size of the buffer for the messages of the driver's compiler.
const LOG_BYTES: usize = 4096;

/// First architecture with instructions for conversions to and from 8 bits.
const SM90: Version = Version { major: 9, minor: 0 };

/// The loaded kernels of one device; see [`Device::kernels`](super::Device::kernels).
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    module: CUmodule,
    /// In the order of [`Kernel::ALL`].
    functions: Vec<CUfunction>,
    /// Whether the device can launch [`Kernel::CopyBulk`].
    pub has_bulk: bool,
    /// The form in which they were loaded.
    pub image: KernelImage,
    multiprocessors: u32,
    /// The time that loading took.
    pub loaded_in: Duration,
    /// The choices by which pools launch.
    pub choices: Choices,
}

// SAFETY: any thread can use modules and functions, and several can at once.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub(super) fn load(
        context: Arc<Context>,
        info: &DeviceInfo,
        choices: Choices,
    ) -> Result<Self, StorageError> {
        let DeviceInfo { capability, multiprocessors, .. } = *info;
        let _pass = context.pass()?;
        let _entered = context.enter()?;
        let begin = Instant::now();
        let (module, image) = load_first(&context, images(capability))?;
        let mut kernels = Self {
            context: context.clone(),
            module,
            functions: Vec::new(),
            has_bulk: false,
            image,
            multiprocessors,
            loaded_in: Duration::ZERO,
            choices,
        };
        for &kernel in Kernel::ALL {
            let mut function = std::ptr::null_mut();
            // SAFETY: the pointer is valid, the module is loaded, and the name ends in a NUL.
            let found = unsafe { sys::cuModuleGetFunction(&mut function, module, kernel.name().as_ptr()) };
            context.check(found, "finding a kernel")?;
            // The driver loads code at the first query, and may wait for the whole device to do so.
            // Do that now and not at the first launch, which may be part of a graph being captured.
            let (mut threads, which) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
            // SAFETY: the pointer is valid and the function was found.
            let asked = unsafe { sys::cuFuncGetAttribute(&mut threads, which, function) };
            context.check(asked, "loading a kernel")?;
            kernels.functions.push(function);
        }
        if capability >= SM90 {
            // More than 48 KiB of shared memory have to be asked for.
            let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bulk = kernels.function(Kernel::CopyBulk);
            // SAFETY: the function was found.
            let set = unsafe { sys::cuFuncSetAttribute(bulk, which, BULK_SHARED_BYTES as i32) };
            // Without, the other kernel copies.
            kernels.has_bulk = set == CUresult::CUDA_SUCCESS;
        }
        kernels.loaded_in = begin.elapsed();
        Ok(kernels)
    }

    /// Returns how pools launch the kernel of some work, if the pieces of copies allow bulk copies.
    pub fn rule(&self, work: Work) -> Rule {
        self.choices.rule(work, self.has_bulk)
    }

    fn function(&self, kernel: Kernel) -> CUfunction {
        self.functions[kernel as usize]
    }

    /// Enqueues a launch, by the rule of its work.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`], [`StorageError::Device`].
    ///
    /// # Safety
    /// The stream lives, and is of the device's primary context. The parameters are the kernel's own
    /// struct, and meet the requirements of [`params`](super::params) until the launch is complete.
    pub unsafe fn launch<P: Params>(
        &self,
        stream: CUstream,
        work: Work,
        params: &P,
    ) -> Result<(), StorageError> {
        let rule = self.choices.rule(work, self.has_bulk && params.allows_bulk());
        let shape = rule.shape(params.jobs(), self.multiprocessors);
        // SAFETY: the caller's promise; the rules are for their kernels.
        unsafe { self.launch_as(stream, rule.kernel, shape, params) }
    }

    /// Enqueues a launch of any shape, for measurements.
    ///
    /// # Errors
    ///
    /// As for [`launch`](Self::launch).
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); the kernel allows the shape.
    pub unsafe fn launch_as<P: DeviceRepr>(
        &self,
        stream: CUstream,
        kernel: Kernel,
        shape: Shape,
        params: &P,
    ) -> Result<(), StorageError> {
        let (function, Shape { ctas, threads, shared_bytes }) = (self.function(kernel), shape);
        let _entered = self.context.enter()?;
        let mut arguments = [(&raw const *params).cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded and takes one struct, which the driver copies during the
        // call; the rest is the caller's promise.
        let launched = unsafe {
            let (start, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
            sys::cuLaunchKernel(function, ctas.max(1), 1, 1, threads, 1, 1, shared_bytes, stream, start, none)
        };
        self.context.check(launched, "launching a kernel")
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let Ok(_pass) = self.context.pass() else { return };
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: the module was loaded, and no one has its functions any more. The driver waits
        // for their launches.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Returns the images for a device, the best one first.
fn images(capability: Version) -> impl Iterator<Item = (KernelImage, *const c_void)> {
    let fits = move |&(major, _): &(u32, &'static Aligned<[u8]>)| major == capability.major;
    let cubin = CUBINS.into_iter().find(fits).map(|(_, code)| (KernelImage::Cubin, code.0.as_ptr().cast()));
    let ptx = if capability >= SM90 { PTX_SM90 } else { PTX_SM80 };
    cubin.into_iter().chain([(KernelImage::Ptx, ptx.as_ptr().cast())])
}

/// Loads the first image that the driver accepts.
fn load_first(
    context: &Context,
    images: impl Iterator<Item = (KernelImage, *const c_void)>,
) -> Result<(CUmodule, KernelImage), StorageError> {
    let mut refused = None;
    for (kind, image) in images {
        let (mut module, mut log) = (ptr::null_mut(), [0u8; LOG_BYTES]);
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The size is passed in the place of a pointer.
        let mut values = [log.as_mut_ptr().cast(), ptr::without_provenance_mut::<c_void>(LOG_BYTES)];
        // SAFETY: the pointers are valid during the call, the image is machine code or text that
        // ends in a NUL, the values are those of the options, and the caller has entered the
        // context.
        let loaded = unsafe {
            let (count, options, values) = (2, options.as_mut_ptr(), values.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, image, count, options, values)
        };
        match context.check(loaded, "loading the kernels").map_err(|error| with_log(error, &log)) {
            Ok(()) => return Ok((module, kind)),
            // Not for this device, or not for this driver: another image may be.
            Err(error) if is_of_image(loaded) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refused.unwrap_or_else(|| unreachable!("there is PTX for every device")))
}

/// Returns true if the driver has refused an image, and not the device.
fn is_of_image(error: CUresult) -> bool {
    use CUresult::*;
    matches!(
        error,
        CUDA_ERROR_INVALID_IMAGE
            | CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_SOURCE
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUDA_ERROR_NOT_SUPPORTED
    )
}

/// Adds the messages of the driver's compiler to an error.
fn with_log(error: StorageError, log: &[u8]) -> StorageError {
    let text = CStr::from_bytes_until_nul(log).unwrap_or_default().to_string_lossy();
    match error {
        StorageError::Device { device, doing, reason } if !text.trim().is_empty() => {
            StorageError::Device { device, doing, reason: format!("{reason}: {}", text.trim()).into() }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_both_modules() {
        for ptx in [PTX_SM80, PTX_SM90] {
            for &kernel in Kernel::ALL {
                assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
            assert_eq!(ptx.find('\0'), Some(ptx.len() - 1));
        }
    }

    #[test]
    fn machine_code_is_for_one_major_version_and_ptx_for_all() {
        for (major, minor) in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let kinds: Vec<_> = images(Version { major, minor }).map(|(kind, _)| kind).collect();
            let has_code = cfg!(kvpool_cubins) && major < 10;
            assert_eq!(kinds.len(), 1 + usize::from(has_code), "{major}.{minor}");
            assert_eq!(kinds.last(), Some(&KernelImage::Ptx));
        }
        // ELF, in place.
        assert!(CUBINS.iter().all(|(_, code)| code.0.starts_with(b"\x7fELF")));
    }
}
