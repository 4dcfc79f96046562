//! Measures how long the kernels take to load: as PTX, which the driver compiles, and as machine code.
//!
//! The driver keeps compiled PTX in a cache on disk. This section's process runs without it ([`ENV`]):
//! the times are those of a first start. Other sections open the device with the cache, and report the
//! times with the device.
//!
//! PTX is compiled once: by the pool, unless it has loaded machine code.

use kvpool_cuda::KernelImage;

use crate::Options;
use crate::gpu::{Gpu, Outcome, cubin};
use crate::report::Section;

/// Turns the driver's cache off, in the environment of the process.
pub const ENV: (&str, &str) = ("CUDA_CACHE_DISABLE", "1");

/// Baseline: PTX, compiled.
const COMPILED: &str = "PTX compiled by the driver";

/// Loads the kernels in each form.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, _options: &Options, section: &mut Section) -> Outcome<()> {
    let is_cold = std::env::var(ENV.0).is_ok_and(|value| value == ENV.1);
    section.check("without the driver's cache", is_cold, format!("{}={}", ENV.0, ENV.1));
    let image = gpu.device.kernels().image;
    let own = gpu.device.kernels().loaded_in.as_secs_f64() * 1e3;
    let compiled = if image == KernelImage::Ptx { own } else { gpu.compile()? };
    section.figure(COMPILED, compiled, "ms");
    let opened = gpu.opened_ms;
    let what = format!("the device opened for a pool, with its kernels as {image}");
    section.ratio(what, opened, "ms", opened / compiled, COMPILED);
    if image != KernelImage::Ptx {
        section.ratio("machine code loaded", own, "ms", own / compiled, COMPILED);
    }
    if cubin(&gpu.device).is_some() {
        let is_code = image == KernelImage::Cubin;
        section.check("the pool has loaded machine code", is_code, image.to_string());
    }
    Ok(())
}
