// Copies and clears of byte ranges by the threads of a CTA or a warp, and the distribution of jobs
// over CTAs.
//
// Each thread has four units in flight: with 16-byte units and 256 threads, these make up one
// piece. For copies of frames, it has eight, so that a team of 128 threads has one piece in flight.
// All loads are issued before the first store waits for one of them. The outer loops are not
// unrolled: unrolling costs registers and gains nothing.
#pragma once

#include "vector.h"

constexpr u32 THREADS = 256;
constexpr u32 WARP = 32;
constexpr u32 IN_FLIGHT = 4;
constexpr u32 COPY_TEAM = 128;
constexpr u32 COPY_IN_FLIGHT = 8;
constexpr u32 COPY_THREADS_MAX = 1024;

// Copies up to `FLIGHT` of the caller's share of `n` units. The caller is one of `TEAM` threads,
// and `n` > 0.
//
// Uses one address per thread plus constant offsets: one address per unit would cost as many more
// registers.
template <u32 TEAM, u32 FLIGHT, class T>
__device__ __forceinline__ void copy_step(const T* from, T* to, u32 n) {
  T held[FLIGHT];
#pragma unroll
  for (u32 k = 0; k < FLIGHT; k++) {
    if (k * TEAM < n) held[k] = load_once(from + k * TEAM);
  }
#pragma unroll
  for (u32 k = 0; k < FLIGHT; k++) {
    if (k * TEAM < n) store_once(to + k * TEAM, held[k]);
  }
}

// Copies `bytes` bytes with `TEAM` threads; `me` is the caller's index among them.
template <u32 TEAM, class T>
__device__ __forceinline__ void copy_units(const u8* from, u8* to, u32 bytes, u32 me) {
  const u32 n = bytes / u32(sizeof(T));
#pragma unroll 1
  for (u32 i = me; i < n; i += IN_FLIGHT * TEAM)
    copy_step<TEAM, IN_FLIGHT, T>(reinterpret_cast<const T*>(from) + i, reinterpret_cast<T*>(to) + i, n - i);
}

template <u32 TEAM>
__device__ __forceinline__ void copy_bytes(const u8* from, u8* to, u32 bytes, u32 unit, u32 me) {
  if (unit == 16) {
    copy_units<TEAM, V16>(from, to, bytes, me);
  } else if (unit == 4) {
    copy_units<TEAM, u32>(from, to, bytes, me);
  } else {
    copy_units<TEAM, u8>(from, to, bytes, me);
  }
}

static_assert(COPY_TEAM * COPY_IN_FLIGHT * 16 == PIECE_BYTES_MAX, "a team has a whole piece in flight");

// Copies one piece with a team of threads.
__device__ __forceinline__ void copy_piece(const u8* from, u8* to, u32 bytes, u32 unit, u32 me) {
  if (unit != 16) return copy_bytes<COPY_TEAM>(from, to, bytes, unit, me);
  const u32 n = bytes / 16;
  if (me >= n) return;
  const V16* first = reinterpret_cast<const V16*>(from) + me;
  copy_step<COPY_TEAM, COPY_IN_FLIGHT, V16>(first, reinterpret_cast<V16*>(to) + me, n - me);
}

template <u32 TEAM, class T>
__device__ __forceinline__ void clear_units(u8* to_bytes, u32 bytes, u32 me) {
  T* to = reinterpret_cast<T*>(to_bytes);
  const u32 n = bytes / u32(sizeof(T));
#pragma unroll 4
  for (u32 i = me; i < n; i += TEAM) store_once(to + i, T{});
}

template <u32 TEAM>
__device__ __forceinline__ void clear_bytes(u8* to, u32 bytes, u32 unit, u32 me) {
  if (unit == 16) {
    clear_units<TEAM, V16>(to, bytes, me);
  } else if (unit == 4) {
    clear_units<TEAM, u32>(to, bytes, me);
  } else {
    clear_units<TEAM, u8>(to, bytes, me);
  }
}

// A rectangle of jobs, distributed round-robin over the CTAs, row by row. It divides only on
// construction: a division takes about twenty instructions, and a job has few more. The tables of
// pieces and frames that jobs read are small and stay in L1, which the moved bytes bypass.
struct Jobs {
  u32 row, column;
  u32 rows, columns;
  u32 row_step, column_step;

  __device__ __forceinline__ Jobs(u32 n_rows, u32 n_columns) : rows(n_rows), columns(n_columns) {
    const u32 divisor = n_columns == 0 ? 1 : n_columns;
    row = n_columns == 0 ? n_rows : blockIdx.x / divisor;
    column = blockIdx.x % divisor;
    row_step = gridDim.x / divisor;
    column_step = gridDim.x % divisor;
  }
  __device__ __forceinline__ bool more() const { return row < rows; }
  __device__ __forceinline__ void next() {
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      row += 1;
    }
  }
};

__device__ __forceinline__ u8* in_frame(u64 base, u64 frame_stride, u32 frame) {
  return reinterpret_cast<u8*>(base + u64(frame) * frame_stride);
}
