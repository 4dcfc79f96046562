// Stand-ins for the CUDA keywords and built-ins that the kernels use, so that a C++17 compiler can
// build them for the host.
//
// A CTA runs on one host thread. If the launch uses shuffles, the CTA's threads are *fibers*, which
// yield only at shuffles; otherwise they are called one after another, in descending order if
// `order` says so. Sanitizers see plain memory accesses and report the line of the kernel that
// makes a bad one.
//
//   order bit 0: threads of a CTA in descending order
//   order bit 1: CTAs of a launch in descending order
//   higher bits: the seed of a shuffle of the CTAs, if not 0
//
// Not modelled: weak memory (threads of a CTA never run at the same time), inline assembly,
// divergence within a warp. A shuffle that some of its named lanes never reach aborts with a
// message.
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

// Indices of the running thread.
extern thread_local Dim thread_index, block_index, block_dim, grid_dim;

// Returns the value that lane `lane ^ mask` of the caller's warp passes to the same call. All lanes
// in `members` take part.
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
