//! Verification of measured operations: some tiles get bytes of their own before, and are compared
//! after.

use crate::gpu::{Gpu, Outcome};

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
        let bytes = pattern(bytes, seed);
        gpu.write(from, &bytes)?;
        // The complement: no byte is right by chance.
        gpu.write(to, &bytes.iter().map(|byte| !byte).collect::<Vec<u8>>())?;
        samples.push(Sample { to, bytes });
    }
    Ok(samples)
}

/// Returns the number of tiles that have not arrived. The device must have no work left.
///
/// # Errors
/// An error of the device.
pub fn missing(gpu: &Gpu, samples: &[Sample]) -> Outcome<usize> {
    let mut missing = 0;
    for Sample { to, bytes } in samples {
        missing += usize::from(gpu.read(*to, bytes.len())? != *bytes);
    }
    Ok(missing)
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let word = |at: u64| {
        ((at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed << 17).wrapping_mul(0xD134_2543_DE82_EF95)
    };
    (0..bytes.div_ceil(8) as u64).flat_map(|at| word(at).to_le_bytes()).take(bytes).collect()
}
