// How a kernel is declared: one struct by value, 256 threads a CTA. Included first; the host's compiler gets its stand-ins
// for the words of CUDA from elsewhere, under `KVP_HOST`.
#pragma once

#ifdef KVP_HOST
#include "shim.h"
#define KVP_KERNEL(name, Params) extern "C" void name(const Params p)
#else
#define KVP_KERNEL(name, Params) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params p)
#endif
