//! kvpool's GPU code without a GPU.
//!
//! The kernels of `kernels/` are compiled as C++ and run here, one CTA after another ([`host`]), or by a driver that takes
//! the place of libcuda ([`mock`]). An [`engine`] in small uses a pool there as an inference engine does.

pub mod engine;
pub mod host;
pub mod mock;
