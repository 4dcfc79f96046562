// Conversion of rows, head by head: assignment of threads to heads, and the work per head.
//
// One group of lanes converts one head of one token's K or V. A group is the smallest power-of-two
// number of lanes of a warp that converts the head in one round of HELD steps of 8 elements per
// lane, whose loads are in flight together; a long head takes the whole warp and several rounds.
// Heads of 64, 128 and 256 take 4, 8 and 16 lanes.
//
//   job = (token * halves + half) * heads + head        halves: 2, or 1 for a latent layout
//
// All groups of a warp run the same number of rounds. Groups without work (padding, or past the
// last job) stay for the shuffles, which name the whole warp.
//
// The types and the unit are arguments, the same for all threads: kernels pass their parameters,
// and an instance for one pair of types passes constants. Units below 16 are rare: their elements
// are accessed one by one.
#pragma once

#include "bytes.h"
#include "codes.h"
#include "floats.h"

// Steps of a lane in flight.
constexpr u32 HELD = 2;

// One head: its addresses outside and inside the pool, and its scale.
struct Head {
  u8* row = nullptr;  // the caller's values
  u8* codes = nullptr;
  float* scale_at = nullptr;  // in the scale tile, or in the table of static scales
};

// Assignment of lanes to a head.
struct Groups {
  u32 lanes;  // per group
  u32 lane;   // index of the caller in its group
  u32 job, step;
  u32 warp_job;  // the warp's first group's job: the same for all its lanes

  __device__ __forceinline__ Groups(u32 steps) {
    u32 log = 0;
#pragma unroll 1
    while (log < 5 && (HELD << log) < steps) log++;
    lanes = 1u << log;
    lane = threadIdx.x & (lanes - 1);
    warp_job = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) << (5 - log);
    job = warp_job + ((threadIdx.x & (WARP - 1)) >> log);
    step = (gridDim.x * (THREADS / WARP)) << (5 - log);
  }
};

// Locates a job's head; returns `false` for padding.
__device__ __forceinline__ bool locate(const QuantParams& p, u32 element, u32 job, Head& head) {
  const bool two = p.rows.v != nullptr;
  const u32 row = job / p.heads;
  const u32 index = job - row * p.heads;
  const u32 token = two ? row >> 1 : row;
  const bool is_v = two && (row & 1);
  const i64 slot = p.rows.slots[token];
  if (slot < 0) return false;
  const u32 frame = u32(slot) / p.rows.block_tokens;
  const u32 offset = u32(slot) - frame * p.rows.block_tokens;

  const u32 first = index * p.head_dim;
  const u64 row_at = u64(token) * (is_v ? p.rows.v_stride : p.rows.k_stride);
  head.row = (is_v ? p.rows.v : p.rows.k) + row_at + first * element;
  const Lane lane = is_v ? p.rows.v_lane : p.rows.k_lane;
  head.codes = in_frame(lane.base, lane.frame_stride, frame) + (u64(offset) * p.rows.row_bytes + first);

  if (p.mode == SCALES_PER_TOKEN_HEAD) {
    const Lane scales = is_v ? p.v_scale_lane : p.k_scale_lane;
    head.scale_at = reinterpret_cast<float*>(in_frame(scales.base, scales.frame_stride, frame)) + (offset * p.heads + index);
  } else if (p.mode == SCALES_PER_HEAD) {
    head.scale_at = const_cast<float*>(is_v ? p.v_scales : p.k_scales) + index;
  }
  return true;
}

// Returns the bits of the largest finite magnitude of `largest` and a step of values. As integers
// they sort like the magnitudes.
__device__ __forceinline__ u32 largest_of(u32 largest, const float* values) {
#pragma unroll
  for (u32 k = 0; k < STEP; k++) {
    const u32 magnitude = bits_of(values[k]) & 0x7FFFFFFF;
    if (magnitude < 0x7F800000u && magnitude > largest) largest = magnitude;
  }
  return largest;
}

__device__ __forceinline__ u32 steps_of(const QuantParams& p) { return (p.head_dim + STEP - 1) / STEP; }
__device__ __forceinline__ u32 jobs_of(const QuantParams& p) {
  return p.rows.n_tokens * (p.rows.v ? 2 : 1) * p.heads;
}

// Returns a job's row, without a look at its slot.
__device__ __forceinline__ u8* row_of(const QuantParams& p, u32 element, u32 job) {
  const bool two = p.rows.v != nullptr;
  const u32 row = job / p.heads;
  const u32 token = two ? row >> 1 : row;
  const bool is_v = two && (row & 1);
  return (is_v ? p.rows.v : p.rows.k) + u64(token) * (is_v ? p.rows.v_stride : p.rows.k_stride) + (job - row * p.heads) * p.head_dim * element;
}

// Converts rows of values of type `row` to codes of type `code`. `is_row_first`, a constant: loads
// the first step of a row before the slot is known, also for padding.
__device__ __forceinline__ void quantise(const QuantParams& p, u32 code, u32 row, u32 unit, bool is_row_first = false) {
  const u32 element = element_bytes(row), steps = steps_of(p), jobs = jobs_of(p);
  const bool is_whole = unit == 16;
  Groups group(steps);
  const u32 round = HELD * group.lanes;
  for (; group.warp_job < jobs; group.warp_job += group.step, group.job += group.step) {
    Head head;
    const bool is_job = group.job < jobs;
    u32 words[HELD][STEP];
    auto load_from = [&](const u8* from, u32 first, u32 end) {
#pragma unroll
      for (u32 k = 0; k < HELD; k++) {
        const u32 i = first + k * group.lanes;
        if (i < end) load_words(row, is_whole, from + i * STEP * element, p.head_dim - i * STEP, words[k]);
      }
    };
    if (is_row_first && is_job) load_from(row_of(p, element, group.job), group.lane, steps);
    const bool live = is_job && locate(p, element, group.job, head);
    const u32 end = live ? steps : 0;
    auto load = [&](u32 first) { load_from(head.row, first, end); };

    float inverse = 1.0f;
    const bool finds_scale = p.mode == SCALES_PER_TOKEN_HEAD;
    if (finds_scale) {
      u32 largest = 0;
#pragma unroll 1
      for (u32 first = group.lane; first < end; first += round) {
        if (!is_row_first || first != group.lane) load(first);
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
          if (first + k * group.lanes >= end) break;
          float values[STEP];
          values_of(row, words[k], values);
          largest = largest_of(largest, values);
        }
      }
#pragma unroll 1
      for (u32 other = group.lanes / 2; other > 0; other /= 2) {
        const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, largest, other);
        largest = theirs > largest ? theirs : largest;
      }
      constexpr float SMALLEST = 1.17549435e-38f;  // so that its inverse is finite
      const float exact = float_of(largest) / largest_code(code);
      const float scale = exact > SMALLEST ? exact : SMALLEST;
      inverse = 1.0f / scale;
      if (live && group.lane == 0) *head.scale_at = scale;
    } else if (live && p.mode == SCALES_PER_HEAD) {
      inverse = 1.0f / *head.scale_at;
    }

    // The values of a head that takes one round are still there; those of a long head are read
    // again.
    const bool is_held = finds_scale && steps <= round;
#pragma unroll 1
    for (u32 first = group.lane; first < end; first += round) {
      if (!is_held && (!is_row_first || finds_scale || first != group.lane)) load(first);
#pragma unroll
      for (u32 k = 0; k < HELD; k++) {
        const u32 i = first + k * group.lanes;
        if (i >= end) break;
        float values[STEP];
        values_of(row, words[k], values);
        write_codes(code, is_whole, head.codes + i * STEP, p.head_dim - i * STEP, values, inverse);
      }
    }
  }
}

// Converts codes to rows of values: the inverse of `quantise`.
__device__ __forceinline__ void dequantise(const QuantParams& p, u32 code, u32 row, u32 unit) {
  const u32 element = element_bytes(row), steps = steps_of(p), jobs = jobs_of(p);
  const bool is_whole = unit == 16;
  Groups group(steps);
  for (; group.job < jobs; group.job += group.step) {
    Head head;
    if (!locate(p, element, group.job, head)) continue;
    const float scale = p.mode == SCALES_UNIT ? 1.0f : *head.scale_at;
#pragma unroll 1
    for (u32 first = group.lane; first < steps; first += HELD * group.lanes) {
      V8 codes[HELD];
#pragma unroll
      for (u32 k = 0; k < HELD; k++) {
        const u32 i = first + k * group.lanes;
        if (i < steps) codes[k] = load_codes(is_whole, head.codes + i * STEP, p.head_dim - i * STEP);
      }
#pragma unroll
      for (u32 k = 0; k < HELD; k++) {
        const u32 i = first + k * group.lanes;
        if (i >= steps) break;
        float values[STEP];
        values_of(code, codes[k], scale, values);
        write_values(row, is_whole, head.row + i * STEP * element, p.head_dim - i * STEP, values);
      }
    }
  }
}
