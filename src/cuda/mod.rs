//! Pools in the memory of CUDA devices.

pub mod params;
