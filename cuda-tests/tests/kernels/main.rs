//! The kernels against the scalar reference: random data with the odd floats, every layout, several grids and orders of
//! CTAs. Every byte of the memory is compared after every launch, also those that no tile has, and those around buffers.

mod arena;
mod buffer;
mod converters;
mod frames;
mod layouts;
mod patch;
mod planted;
mod ptx;
mod rows;
