// Units of bytes: loads and stores of 16, 4 or 1 bytes by a thread.
//
// Moved bytes are read once and written once, so they bypass L1, where they would evict data that
// other kernels read. The host compiler sees plain accesses, so that its sanitizers report the line
// of a misaligned or out-of-bounds one.
#pragma once

#include "params.h"

struct alignas(16) V16 {
  u32 x, y, z, w;
};

__device__ __forceinline__ V16 load_once(const V16* from) {
#if defined(__CUDA_ARCH__)
  V16 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
#else
  return *from;
#endif
}

__device__ __forceinline__ void store_once(V16* to, V16 v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  *to = v;
#endif
}

// Layouts with smaller units are rare; many units share a cache line, so L1 helps.
template <class T>
__device__ __forceinline__ T load_once(const T* from) {
  return *from;
}
template <class T>
__device__ __forceinline__ void store_once(T* to, T v) {
  *to = v;
}

// Reinterprets the bits as another type.
__device__ __forceinline__ float float_of(u32 bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

__device__ __forceinline__ u32 bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}
