//! kvpool's GPU code without a GPU.
//!
//! The kernels of `kernels/` are compiled as C++ and run here, one CTA after another ([`host`]).

pub mod host;
pub mod mock;
