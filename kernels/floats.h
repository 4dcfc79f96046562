// Element types of the caller's rows: f32, f16 and bf16, as bits in memory and as f32 in registers.
//
// Widening is exact. Narrowing rounds to nearest, ties to even; NaN becomes 0x7FFF, as in the
// device's instructions. No CUDA header is included: a type is represented by its bits.
#pragma once

#include "vector.h"

// Without branches, so that host and device compilers produce equivalent code.
__device__ __forceinline__ float f16_widen(u32 bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(bits)));
  return value;
#else
  // Exponent and mantissa in their places, the difference of the biases applied as a factor: exact,
  // for subnormals too.
  const u32 magnitude = bits & 0x7FFF;
  const float small = float_of(magnitude << 13) * float_of(u32(127 + 112) << 23);
  const u32 large = (magnitude << 13) | 0x7F800000u;
  return float_of((magnitude < 0x7C00 ? bits_of(small) : large) | (bits & 0x8000) << 16);
#endif
}

__device__ __forceinline__ u32 f16_narrow(float value) {
#if defined(__CUDA_ARCH__)
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const u32 bits = bits_of(value);
  const u32 magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  // Normal: add just under half a step, plus the lowest kept bit for ties. Subnormal: the adder
  // rounds.
  const u32 normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const float magic = 0.5f;  // its last place is 2^-24, the step of f16's subnormals
  const u32 subnormal = bits_of(float_of(magnitude) + magic) - bits_of(magic);
  u32 half = magnitude < 0x38800000u ? subnormal : normal - (112u << 10);
  if (magnitude >= 0x47800000u || half > 0x7C00) half = 0x7C00;
  return half | (bits >> 16 & 0x8000);
#endif
}

__device__ __forceinline__ u32 bf16_narrow(float value) {
#if defined(__CUDA_ARCH__)
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const u32 bits = bits_of(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000u) return 0x7FFF;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#endif
}

// Layout of elements in 32-bit words: `PER_WORD` elements, the first in the low bits.
struct F32 {
  static constexpr u32 PER_WORD = 1;
  using Element = u32;
  static __device__ __forceinline__ void widen(u32 word, float* values) { values[0] = float_of(word); }
  static __device__ __forceinline__ u32 narrow(const float* values) { return bits_of(values[0]); }
};
struct F16 {
  static constexpr u32 PER_WORD = 2;
  using Element = u16;
  static __device__ __forceinline__ void widen(u32 word, float* values) {
    values[0] = f16_widen(word & 0xFFFF);
    values[1] = f16_widen(word >> 16);
  }
  static __device__ __forceinline__ u32 narrow(const float* values) {
    return f16_narrow(values[0]) | f16_narrow(values[1]) << 16;
  }
  static __device__ __forceinline__ float widen_one(u16 bits) { return f16_widen(bits); }
  static __device__ __forceinline__ u16 narrow_one(float value) { return u16(f16_narrow(value)); }
};
struct Bf16 {
  static constexpr u32 PER_WORD = 2;
  using Element = u16;
  static __device__ __forceinline__ void widen(u32 word, float* values) {
    values[0] = float_of(word << 16);
    values[1] = float_of(word & 0xFFFF0000u);
  }
  static __device__ __forceinline__ u32 narrow(const float* values) {
#if defined(__CUDA_ARCH__)
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
#else
    return bf16_narrow(values[0]) | bf16_narrow(values[1]) << 16;
#endif
  }
  static __device__ __forceinline__ float widen_one(u16 bits) { return float_of(u32(bits) << 16); }
  static __device__ __forceinline__ u16 narrow_one(float value) { return u16(bf16_narrow(value)); }
};

// Reads `N` elements: 8 at a multiple of 16 bytes, 4 at a multiple of 4, or 1 at a multiple of its
// own size.
template <class Row, u32 N>
__device__ __forceinline__ void read_values(const u8* from, float* values) {
  if constexpr (N == 8) {
    constexpr u32 PER_VECTOR = 4 * Row::PER_WORD;
#pragma unroll
    for (u32 k = 0; k < N / PER_VECTOR; k++) {
      const V16 v = load_once(reinterpret_cast<const V16*>(from) + k);
      float* at = values + k * PER_VECTOR;
      Row::widen(v.x, at);
      Row::widen(v.y, at + Row::PER_WORD);
      Row::widen(v.z, at + 2 * Row::PER_WORD);
      Row::widen(v.w, at + 3 * Row::PER_WORD);
    }
  } else if constexpr (N == 4) {
#pragma unroll
    for (u32 k = 0; k < N / Row::PER_WORD; k++)
      Row::widen(load_once(reinterpret_cast<const u32*>(from) + k), values + k * Row::PER_WORD);
  } else if constexpr (Row::PER_WORD == 1) {
    Row::widen(*reinterpret_cast<const u32*>(from), values);
  } else {
    values[0] = Row::widen_one(*reinterpret_cast<const u16*>(from));
  }
}

// Writes `N` elements: the inverse of `read_values`.
template <class Row, u32 N>
__device__ __forceinline__ void write_values(u8* to, const float* values) {
  if constexpr (N == 8) {
    constexpr u32 PER_VECTOR = 4 * Row::PER_WORD;
#pragma unroll
    for (u32 k = 0; k < N / PER_VECTOR; k++) {
      const float* at = values + k * PER_VECTOR;
      const V16 v = {Row::narrow(at), Row::narrow(at + Row::PER_WORD), Row::narrow(at + 2 * Row::PER_WORD),
                     Row::narrow(at + 3 * Row::PER_WORD)};
      store_once(reinterpret_cast<V16*>(to) + k, v);
    }
  } else if constexpr (N == 4) {
#pragma unroll
    for (u32 k = 0; k < N / Row::PER_WORD; k++)
      store_once(reinterpret_cast<u32*>(to) + k, Row::narrow(values + k * Row::PER_WORD));
  } else if constexpr (Row::PER_WORD == 1) {
    *reinterpret_cast<u32*>(to) = Row::narrow(values);
  } else {
    *reinterpret_cast<u16*>(to) = Row::narrow_one(values[0]);
  }
}
