//! Tests of kvpool's GPU code without a GPU.
//!
//! The kernels of `kernels/` are compiled as C++ and run here, one CTA after another ([`host`]), or
//! by a driver that replaces libcuda ([`mock`]). A small [`engine`] uses a pool on it like an
//! inference engine.

pub mod engine;
pub mod host;
pub mod mock;
