//! Measures how long the kernels take to load: as PTX, which the driver compiles, and as machine code.
//!
//! The driver keeps compiled PTX in a cache on disk. This section's process runs without it ([`ENV`]):
//! the times are those of a first start. Other sections open the device with the cache, and report the
//! times with the device.

use std::ffi::{CString, c_void};
use std::time::Instant;

use cudarc::driver::result;

use crate::Options;
use crate::gpu::{Gpu, Outcome, median};
use crate::report::Section;

/// Turns the driver's cache off, in the environment of the process.
pub const ENV: (&str, &str) = ("CUDA_CACHE_DISABLE", "1");

/// Baseline: PTX, compiled.
const COMPILED: &str = "PTX compiled by the driver";

/// Loads the kernels in each form.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let times = if options.quick { 1 } else { 3 };
    let is_cold = std::env::var(ENV.0).is_ok_and(|value| value == ENV.1);
    section.check("without the driver's cache", is_cold, format!("{}={}", ENV.0, ENV.1));
    gpu.context.bind_to_thread()?;
    let text = CString::new(gpu.ptx())?;
    let compiled = load(times, text.as_ptr().cast())?;
    section.figure(COMPILED, compiled, "ms");
    let opened = gpu.opened_ms();
    let what = format!("the device opened for a pool, with its kernels as {}", gpu.device.kernel_image());
    section.ratio(what, opened, "ms", opened / compiled, COMPILED);
    #[cfg(kvpool_cubins)]
    if let Some(code) = gpu.cubin() {
        // The driver reads 64-bit fields in place.
        let mut aligned = vec![0u64; code.len().div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(code.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let loaded = load(times, aligned.as_ptr().cast())?;
        section.ratio("machine code loaded", loaded, "ms", loaded / compiled, COMPILED);
        let image = gpu.device.kernel_image();
        let is_code = image == kvpool_cuda::KernelImage::Cubin;
        section.check("the pool has loaded machine code", is_code, image.to_string());
    }
    Ok(())
}

/// Returns the median time to load an image, in milliseconds.
fn load(times: usize, image: *const c_void) -> Outcome<f64> {
    let mut took = Vec::with_capacity(times);
    for _ in 0..times {
        let begin = Instant::now();
        // SAFETY: PTX that ends in a NUL, or machine code; the module is not used.
        unsafe {
            let module = result::module::load_data(image)?;
            took.push(begin.elapsed().as_secs_f64() * 1e3);
            result::module::unload(module)?;
        }
    }
    Ok(median(took))
}
