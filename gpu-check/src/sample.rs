//! Verification of measured operations: some tiles get bytes of their own before, and are compared
//! after.

use cudarc::driver::CudaStream;
use kvpool_testkit::rng::Rng;

use crate::gpu::{Gpu, Outcome};
use crate::report::Section;

/// A tile that must arrive at another address.
pub struct Sample {
    to: u64,
    bytes: Vec<u8>,
}

/// Writes bytes of their own to `bytes`-long tiles, and others to the places where they must arrive.
///
/// # Errors
/// An error of the device.
pub fn plant(gpu: &Gpu, bytes: usize, tiles: impl IntoIterator<Item = (u64, u64)>) -> Outcome<Vec<Sample>> {
    let mut samples = Vec::new();
    for (seed, (from, to)) in (1..).zip(tiles) {
        let bytes = Rng(seed).bytes(bytes);
        gpu.write(from, &bytes)?;
        // The complement: no byte is right by chance.
        gpu.write(to, &bytes.iter().map(|byte| !byte).collect::<Vec<u8>>())?;
        samples.push(Sample { to, bytes });
    }
    Ok(samples)
}

/// Returns the number of tiles that have not arrived when the stream has executed its work.
///
/// # Errors
/// An error of the device.
pub fn missing(gpu: &Gpu, stream: &CudaStream, samples: &[Sample]) -> Outcome<usize> {
    stream.synchronize()?;
    let mut missing = 0;
    for Sample { to, bytes } in samples {
        missing += usize::from(gpu.read(*to, bytes.len())? != *bytes);
    }
    Ok(missing)
}

/// Checks that all tiles have arrived when the stream has executed its work.
///
/// # Errors
/// An error of the device.
pub fn check(
    gpu: &Gpu,
    stream: &CudaStream,
    section: &mut Section,
    what: impl Into<String>,
    samples: &[Sample],
) -> Outcome<()> {
    let missing = missing(gpu, stream, samples)?;
    section.none(what, missing, format_args!("of {} tiles differ", samples.len()));
    Ok(())
}
