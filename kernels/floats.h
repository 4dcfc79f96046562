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

__device__ __forceinline__ float bf16_widen(u32 bits) { return float_of(bits << 16); }

// Narrows two values to one word, the first in its low half.
__device__ __forceinline__ u32 bf16_narrow_two(const float* values) {
#if defined(__CUDA_ARCH__)
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
  return word;
#else
  return bf16_narrow(values[0]) | bf16_narrow(values[1]) << 16;
#endif
}

// Elements that a thread converts in one step.
constexpr u32 STEP = 8;

__device__ __forceinline__ u32 element_bytes(u32 type) { return type == ROWS_F32 ? 4 : 2; }

// Loads a step of elements of `type`: words of two elements each, or of one f32. With `is_whole`,
// all exist and start at a multiple of 16 bytes; otherwise `n` exist, at a multiple of their size,
// and the others count as zero.
__device__ __forceinline__ void load_words(u32 type, bool is_whole, const u8* from, u32 n, u32* words) {
  if (is_whole) {
    const V16 low = load_once(reinterpret_cast<const V16*>(from));
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    if (type == ROWS_F32) {
      const V16 high = load_once(reinterpret_cast<const V16*>(from) + 1);
      words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
    }
  } else if (type == ROWS_F32) {
#pragma unroll
    for (u32 k = 0; k < STEP; k++) words[k] = k < n ? reinterpret_cast<const u32*>(from)[k] : 0;
  } else {
    const u16* elements = reinterpret_cast<const u16*>(from);
#pragma unroll
    for (u32 k = 0; k < STEP; k += 2) {
      const u32 low = k < n ? elements[k] : 0, high = k + 1 < n ? elements[k + 1] : 0;
      words[k / 2] = low | high << 16;
    }
  }
}

// Returns the values of a step of loaded elements.
__device__ __forceinline__ void values_of(u32 type, const u32* words, float* values) {
#pragma unroll
  for (u32 k = 0; k < STEP; k++) {
    const u32 half = k % 2 == 0 ? words[k / 2] & 0xFFFF : words[k / 2] >> 16;
    values[k] = type == ROWS_F32 ? float_of(words[k]) : type == ROWS_F16 ? f16_widen(half) : bf16_widen(half);
  }
}

// Writes a step of elements: the inverse of `load_words` and `values_of`.
__device__ __forceinline__ void write_values(u32 type, bool is_whole, u8* to, u32 n, const float* values) {
  u32 words[STEP];
#pragma unroll
  for (u32 k = 0; k < STEP; k++) words[k] = bits_of(values[k]);
  if (type == ROWS_F16) {
#pragma unroll
    for (u32 k = 0; k < STEP / 2; k++) words[k] = f16_narrow(values[2 * k]) | f16_narrow(values[2 * k + 1]) << 16;
  } else if (type == ROWS_BF16) {
#pragma unroll
    for (u32 k = 0; k < STEP / 2; k++) words[k] = bf16_narrow_two(values + 2 * k);
  }
  if (is_whole) {
    store_once(reinterpret_cast<V16*>(to), V16{words[0], words[1], words[2], words[3]});
    if (type == ROWS_F32) store_once(reinterpret_cast<V16*>(to) + 1, V16{words[4], words[5], words[6], words[7]});
  } else if (type == ROWS_F32) {
#pragma unroll
    for (u32 k = 0; k < STEP; k++)
      if (k < n) reinterpret_cast<u32*>(to)[k] = words[k];
  } else {
#pragma unroll
    for (u32 k = 0; k < STEP; k++)
      if (k < n) reinterpret_cast<u16*>(to)[k] = u16(words[k / 2] >> 16 * (k % 2));
  }
}
