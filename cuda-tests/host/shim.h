// Stand-ins for the words of CUDA that the kernels use, so that a C++17 compiler can make a host's program of them.
//
// A CTA runs on one thread of the host. Its threads are *fibers*, which give way to each other at shuffles only, or, where
// a launch uses none, are called one after another, last first if the order says so. Sanitizers see plain memory accesses
// and name the line of the kernel that makes a bad one.
//
//   order bit 0: threads of a CTA in descending order      order bit 1: CTAs of a launch in descending order
//   the bits above: the seed of a shuffle of the CTAs, if not 0
//
// What it does not model: weak memory (threads of a CTA never run at once), inline assembly, divergence within a warp. A
// shuffle that some of the named lanes never reach is reported, and aborts.
#pragma once

#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)

namespace shim {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Of the thread that runs now.
extern thread_local Dim thread_index, block_index, block_dim, grid_dim;

// What lane `lane ^ mask` of the caller's warp passes to the same call; all lanes that `members` names take part.
uint32_t shuffle_xor(uint32_t members, uint32_t value, unsigned mask);

}  // namespace shim

#define threadIdx (::shim::thread_index)
#define blockIdx (::shim::block_index)
#define blockDim (::shim::block_dim)
#define gridDim (::shim::grid_dim)

inline uint32_t __shfl_xor_sync(uint32_t members, uint32_t value, unsigned mask) {
  return ::shim::shuffle_xor(members, value, mask);
}

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
