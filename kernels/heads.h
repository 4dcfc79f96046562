// Conversion of rows, head by head: assignment of threads to heads, and the work per head.
//
// One group of lanes converts one head of one token's K or V. A group is the smallest power-of-two
// number of lanes of a warp that converts the head in one step of `N` elements per lane; a long
// head takes the whole warp and several steps. With 8 elements per step, heads of 64, 128 and 256
// take 8, 16 and 32 lanes.
//
//   job = (token * halves + half) * heads + head        halves: 2, or 1 for a latent layout
//
// All groups of a warp run the same number of rounds. Groups without work (padding, or past the
// last job) stay for the shuffles, which name the whole warp.
#pragma once

#include "bytes.h"
#include "codes.h"
#include "floats.h"

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
    while (log < 5 && (1u << log) < steps) log++;
    lanes = 1u << log;
    lane = threadIdx.x & (lanes - 1);
    warp_job = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) << (5 - log);
    job = warp_job + ((threadIdx.x & (WARP - 1)) >> log);
    step = (gridDim.x * (THREADS / WARP)) << (5 - log);
  }
};

// Locates a job's head; returns `false` for padding.
template <u32 ELEMENT>
__device__ __forceinline__ bool locate(const QuantParams& p, u32 job, Head& head) {
  const bool two = p.rows.v != nullptr;
  const u32 index = job % p.heads;
  const u32 row = job / p.heads;
  const u32 token = two ? row >> 1 : row;
  const bool is_v = two && (row & 1);
  const i64 slot = p.rows.slots[token];
  if (slot < 0) return false;
  const u32 frame = u32(slot) / p.rows.block_tokens;
  const u32 offset = u32(slot) - frame * p.rows.block_tokens;

  const u32 first = index * p.head_dim;
  const u64 row_at = u64(token) * (is_v ? p.rows.v_stride : p.rows.k_stride);
  head.row = (is_v ? p.rows.v : p.rows.k) + row_at + first * ELEMENT;
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

// Returns the bits of the largest finite magnitude of `largest` and `values`. As integers they sort
// like the magnitudes.
template <u32 N>
__device__ __forceinline__ u32 largest_of(u32 largest, const float* values) {
#pragma unroll
  for (u32 k = 0; k < N; k++) {
    const u32 magnitude = bits_of(values[k]) & 0x7FFFFFFF;
    if (magnitude < 0x7F800000u && magnitude > largest) largest = magnitude;
  }
  return largest;
}

template <class Code, class Row, u32 N>
__device__ __forceinline__ void quantise_by(const QuantParams& p) {
  constexpr u32 ELEMENT = sizeof(typename Row::Element);
  const u32 steps = p.head_dim / N;
  const u32 jobs = p.rows.n_tokens * (p.rows.v ? 2 : 1) * p.heads;
  Groups group(steps);
  for (; group.warp_job < jobs; group.warp_job += group.step, group.job += group.step) {
    Head head;
    const bool live = group.job < jobs && locate<ELEMENT>(p, group.job, head);
    // A head that takes one step is read once; the later steps of a long head are read again.
    const bool mine = live && group.lane < steps;
    float held[N];
    if (mine) read_values<Row, N>(head.row + group.lane * N * ELEMENT, held);

    float inverse = 1.0f;
    if (p.mode == SCALES_PER_TOKEN_HEAD) {
      u32 largest = mine ? largest_of<N>(0, held) : 0;
      if (live) {
#pragma unroll 1
        for (u32 i = group.lane + group.lanes; i < steps; i += group.lanes) {
          float values[N];
          read_values<Row, N>(head.row + i * N * ELEMENT, values);
          largest = largest_of<N>(largest, values);
        }
      }
#pragma unroll 1
      for (u32 other = group.lanes / 2; other > 0; other /= 2) {
        const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, largest, other);
        largest = theirs > largest ? theirs : largest;
      }
      constexpr float SMALLEST = 1.17549435e-38f;  // so that its inverse is finite
      const float exact = float_of(largest) / Code::MAX;
      const float scale = exact > SMALLEST ? exact : SMALLEST;
      inverse = 1.0f / scale;
      if (live && group.lane == 0) *head.scale_at = scale;
    } else if (live && p.mode == SCALES_PER_HEAD) {
      inverse = 1.0f / *head.scale_at;
    }

    if (mine) write_codes<Code, N>(head.codes + group.lane * N, held, inverse);
    if (live) {
#pragma unroll 1
      for (u32 i = group.lane + group.lanes; i < steps; i += group.lanes) {
        float values[N];
        read_values<Row, N>(head.row + i * N * ELEMENT, values);
        write_codes<Code, N>(head.codes + i * N, values, inverse);
      }
    }
  }
}

template <class Code, class Row, u32 N>
__device__ __forceinline__ void dequantise_by(const QuantParams& p) {
  constexpr u32 ELEMENT = sizeof(typename Row::Element);
  const u32 steps = p.head_dim / N;
  const u32 jobs = p.rows.n_tokens * (p.rows.v ? 2 : 1) * p.heads;
  Groups group(steps);
  for (; group.job < jobs; group.job += group.step) {
    Head head;
    if (!locate<ELEMENT>(p, group.job, head)) continue;
    const float scale = p.mode == SCALES_UNIT ? 1.0f : *head.scale_at;
#pragma unroll 1
    for (u32 i = group.lane; i < steps; i += group.lanes) {
      float values[N];
      read_codes<Code, N>(head.codes + i * N, scale, values);
      write_values<Row, N>(head.row + i * N * ELEMENT, values);
    }
  }
}

template <class Code, class Row>
__device__ __forceinline__ void quantise(const QuantParams& p) {
  if (p.rows.unit == 16) {
    quantise_by<Code, Row, 8>(p);
  } else if (p.rows.unit == 4) {
    quantise_by<Code, Row, 4>(p);
  } else {
    quantise_by<Code, Row, 1>(p);
  }
}

template <class Code, class Row>
__device__ __forceinline__ void dequantise(const QuantParams& p) {
  if (p.rows.unit == 16) {
    dequantise_by<Code, Row, 8>(p);
  } else if (p.rows.unit == 4) {
    dequantise_by<Code, Row, 4>(p);
  } else {
    dequantise_by<Code, Row, 1>(p);
  }
}
