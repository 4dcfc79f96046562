// Declaration of a kernel: one struct by value, 256 threads per CTA. Include this file first. Under
// `KVP_HOST`, `shim.h` supplies the host compiler's stand-ins for CUDA's keywords.
#pragma once

#ifdef KVP_HOST
#include "shim.h"
#define KVP_KERNEL(name, Params) extern "C" void name(const Params p)
#define KVP_KERNEL_OF(threads, name, Params) KVP_KERNEL(name, Params)
#else
#define KVP_KERNEL(name, Params) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params p)
#define KVP_KERNEL_OF(threads, name, Params) extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p)
#endif
