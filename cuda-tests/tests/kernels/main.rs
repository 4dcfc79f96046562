//! The kernels against the scalar reference: random data with special floats, every layout, several
//! grids and orders of CTAs. After every launch all bytes of the memory are compared, including
//! those outside tiles and around buffers.

mod arena;
mod buffer;
mod converters;
mod frames;
mod layouts;
mod patch;
mod planted;
mod ptx;
mod rows;
