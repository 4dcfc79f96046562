//! Pools in the memory of CUDA devices.
