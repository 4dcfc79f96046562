// 8-bit codes: E4M3, E5M2 and int8, bit for bit equal to those of `src/storage/fp8.rs` and
// `quant.rs`.
//
// | code | largest | NaN | infinity becomes |
// |---|---|---|---|
// | E4M3 | 0x7E = 448 | 0x7F | the largest |
// | E5M2 | 0x7B = 57344 | 0x7E | the largest |
// | int8 | 127 | 0 | the largest |
//
// Rounding is to nearest, ties to even. From compute capability 9.0 on, one instruction converts
// two values; the code does not rely on which NaN it gives. The rest is integer arithmetic without
// branches.
#pragma once

#include "vector.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVP_HAS_FP8 1
#else
#define KVP_HAS_FP8 0
#endif

// Returns 2^exponent, for exponents of normal numbers.
__device__ __forceinline__ float power_of_two(int exponent) { return float_of(u32(exponent + 127) << 23); }

// Returns the code of `value` in a format given by its mantissa width (`MANTISSA`), its bias, and
// its codes for the largest value and for NaN.
template <u32 MANTISSA, int BIAS, u32 MAX, u32 NAN_CODE>
__device__ __forceinline__ u32 encode_float(float value) {
  const u32 bits = bits_of(value);
  const u32 magnitude = bits & 0x7FFFFFFF;

  // Normal: add just under half a step, plus the lowest kept bit for ties, then truncate; a carry
  // propagates into the exponent.
  constexpr u32 CUT = 23 - MANTISSA;
  const u32 rounded = (magnitude + ((1u << (CUT - 1)) - 1) + ((magnitude >> CUT) & 1)) >> CUT;
  const u32 normal = rounded - (u32(127 - BIAS) << MANTISSA);

  // Subnormal: adding a power of two whose last place is one step makes the adder round.
  const float magic = power_of_two(1 - BIAS - int(MANTISSA) + 23);
  const u32 subnormal = bits_of(float_of(magnitude) + magic) - bits_of(magic);

  const u32 code = magnitude < bits_of(power_of_two(1 - BIAS)) ? subnormal : normal;
  const u32 finite = code > MAX ? MAX : code;
  return magnitude > 0x7F800000u ? NAN_CODE : (finite | (bits >> 24 & 0x80));
}

// Returns the value of a code of such a format. The caller handles codes above the largest.
template <u32 MANTISSA, int BIAS>
__device__ __forceinline__ float decode_float(u32 code) {
  // The difference of the biases is applied as a factor: exact, for subnormals too.
  const float magnitude = float_of((code & 0x7F) << (23 - MANTISSA)) * power_of_two(127 - BIAS);
  return float_of(bits_of(magnitude) | (code & 0x80) << 24);
}

// Returns the pair of codes with those of NaN inputs replaced by `nan`.
__device__ __forceinline__ u32 with_nan(u32 pair, float low, float high, u32 nan) {
  if (low != low) pair = (pair & 0xFF00) | nan;
  if (high != high) pair = (pair & 0x00FF) | nan << 8;
  return pair;
}

struct E4m3 {
  static constexpr float MAX = 448.0f;
  static constexpr u32 NAN_CODE = 0x7F;
  static __device__ __forceinline__ u32 encode(float value) { return encode_float<3, 7, 0x7E, NAN_CODE>(value); }
  static __device__ __forceinline__ float decode(u32 code) {
    return (code & 0x7F) == 0x7F ? float_of(0x7FC00000u) : decode_float<3, 7>(code);
  }
  static __device__ __forceinline__ u32 encode_two(float low, float high) {
#if KVP_HAS_FP8
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return with_nan(pair, low, high, NAN_CODE);
#else
    return encode(low) | encode(high) << 8;
#endif
  }
  static __device__ __forceinline__ void decode_two(u32 pair, float* values) {
#if KVP_HAS_FP8
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(pair)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(values[0]) : "h"(u16(halves)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(values[1]) : "h"(u16(halves >> 16)));
#else
    values[0] = decode(pair & 0xFF);
    values[1] = decode(pair >> 8 & 0xFF);
#endif
  }
};

struct E5m2 {
  static constexpr float MAX = 57344.0f;
  static constexpr u32 NAN_CODE = 0x7E;
  static __device__ __forceinline__ u32 encode(float value) { return encode_float<2, 15, 0x7B, NAN_CODE>(value); }
  static __device__ __forceinline__ float decode(u32 code) {
#if defined(__CUDA_ARCH__)
    // The code is the upper half of an f16.
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(code << 8)));
    return value;
#else
    // From 0x7C on: infinity, then NaN.
    const u32 above = 0x7F800000u | (code & 3) << 21 | (code & 0x80) << 24;
    return (code & 0x7F) >= 0x7C ? float_of(above) : decode_float<2, 15>(code);
#endif
  }
  static __device__ __forceinline__ u32 encode_two(float low, float high) {
#if KVP_HAS_FP8
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return with_nan(pair, low, high, NAN_CODE);
#else
    return encode(low) | encode(high) << 8;
#endif
  }
  static __device__ __forceinline__ void decode_two(u32 pair, float* values) {
    values[0] = decode(pair & 0xFF);
    values[1] = decode(pair >> 8 & 0xFF);
  }
};

struct Int8 {
  static constexpr float MAX = 127.0f;
  static __device__ __forceinline__ u32 encode(float value) {
    // The last place of this number is 1 and its low byte is 0, so the integer ends up in the low
    // byte.
    constexpr float ROUND = 12582912.0f;
    const float below = value < 127.0f ? value : 127.0f;
    const float within = below > -127.0f ? below : -127.0f;
    return bits_of((value != value ? 0.0f : within) + ROUND) & 0xFF;
  }
  static __device__ __forceinline__ float decode(u32 code) { return float(i8(code)); }
  static __device__ __forceinline__ u32 encode_two(float low, float high) { return encode(low) | encode(high) << 8; }
  static __device__ __forceinline__ void decode_two(u32 pair, float* values) {
    values[0] = decode(pair & 0xFF);
    values[1] = decode(pair >> 8 & 0xFF);
  }
};

struct alignas(8) V8 {
  u32 x, y;
};

template <class Code>
__device__ __forceinline__ u32 encode_four(const float* values, float inverse) {
  const u32 low = Code::encode_two(values[0] * inverse, values[1] * inverse);
  return low | Code::encode_two(values[2] * inverse, values[3] * inverse) << 16;
}

template <class Code>
__device__ __forceinline__ V8 encode_eight(const float* values, float inverse) {
  return {encode_four<Code>(values, inverse), encode_four<Code>(values + 4, inverse)};
}

template <class Code>
__device__ __forceinline__ void decode_four(u32 codes, float* values) {
  Code::decode_two(codes & 0xFFFF, values);
  Code::decode_two(codes >> 16, values + 2);
}

template <class Code>
__device__ __forceinline__ void decode_eight(V8 codes, float* values) {
  decode_four<Code>(codes.x, values);
  decode_four<Code>(codes.y, values + 4);
}

// Returns the largest value of a type.
__device__ __forceinline__ float largest_code(u32 type) {
  return type == CODES_E4M3 ? E4m3::MAX : type == CODES_E5M2 ? E5m2::MAX : Int8::MAX;
}

// Writes the codes of 8 values: all, at a multiple of 8 bytes, or the first `n`.
__device__ __forceinline__ void write_codes(u32 type, bool is_whole, u8* to, u32 n, const float* values, float inverse) {
  V8 codes;
  if (type == CODES_E4M3) {
    codes = encode_eight<E4m3>(values, inverse);
  } else if (type == CODES_E5M2) {
    codes = encode_eight<E5m2>(values, inverse);
  } else {
    codes = encode_eight<Int8>(values, inverse);
  }
  if (is_whole) {
    *reinterpret_cast<V8*>(to) = codes;
    return;
  }
#pragma unroll
  for (u32 k = 0; k < 8; k++)
    if (k < n) to[k] = u8((k < 4 ? codes.x : codes.y) >> 8 * (k % 4));
}

// Loads the codes of 8 values: the inverse of `write_codes`, with `values_of`.
__device__ __forceinline__ V8 load_codes(bool is_whole, const u8* from, u32 n) {
  if (is_whole) return *reinterpret_cast<const V8*>(from);
  V8 codes{0, 0};
#pragma unroll
  for (u32 k = 0; k < 8; k++)
    if (k < n) (k < 4 ? codes.x : codes.y) |= u32(from[k]) << 8 * (k % 4);
  return codes;
}

// Returns the values of loaded codes.
__device__ __forceinline__ void values_of(u32 type, V8 codes, float scale, float* values) {
  if (type == CODES_E4M3) {
    decode_eight<E4m3>(codes, values);
  } else if (type == CODES_E5M2) {
    decode_eight<E5m2>(codes, values);
  } else {
    decode_eight<Int8>(codes, values);
  }
#pragma unroll
  for (u32 k = 0; k < 8; k++) values[k] *= scale;
}
