// The kernels of kvpool. One source for three compilers: NVRTC (`ptx.py` keeps its output in
// `ptx/`), nvcc, and a host's C++17 compiler. `params.h` declares each kernel's parameters.
//
// The frames come from a *move* or a list, the pieces from the layout. A launch reads and writes
// only memory that its caller holds. The host orders launches; no kernel waits for another.
#include "entry.h"

#include "bulk.h"
#include "bytes.h"
#include "heads.h"

__device__ __forceinline__ Move move_at(const CopyParams& p, u32 index) {
  return p.moves ? p.moves[index] : p.few[index];
}

// Copies frames: every piece of every move, one piece per team of a CTA.
KVP_KERNEL_OF(COPY_THREADS_MAX, kvp_copy, CopyParams) {
  const u32 teams = blockDim.x / COPY_TEAM;
  const u32 jobs = p.n_moves * p.n_pieces;
  // A division per job, not `Jobs`, whose state would not fit into the registers.
#pragma unroll 1
  for (u32 job = blockIdx.x * teams + threadIdx.x / COPY_TEAM; job < jobs; job += gridDim.x * teams) {
    const u32 row = job / p.n_pieces;
    const Piece piece = p.pieces[job - row * p.n_pieces];
    const Move move = move_at(p, row);
    const u8* from = in_frame(piece.base, piece.frame_stride, move.src);
    u8* to = in_frame(piece.base, piece.frame_stride, move.dst);
    copy_piece(from, to, piece.bytes, p.unit, threadIdx.x % COPY_TEAM);
  }
}

// Does the same by bulk copies, issued by one thread of each CTA. Below compute capability 9.0 it
// does nothing, and is not launched.
KVP_KERNEL_OF(BULK_THREADS, kvp_copy_bulk, CopyParams) {
#if KVP_HAS_BULK
  KVP_SHARED(ring_memory, marks);
  if (threadIdx.x != 0) return;
  Ring ring(ring_memory, marks);
  Jobs ahead(p.n_moves, p.n_pieces);
  u32 n_loads = 0;
  auto load = [&] {
    if (!ahead.more()) return;
    const Piece piece = p.pieces[ahead.column];
    ring.load(n_loads++, in_frame(piece.base, piece.frame_stride, move_at(p, ahead.row).src), piece.bytes);
    ahead.next();
  };
#pragma unroll 1
  for (u32 i = 0; i < STAGES - 1; i++) load();
  u32 i = 0;
#pragma unroll 1
  for (Jobs job(p.n_moves, p.n_pieces); job.more(); job.next(), i++) {
    const Piece piece = p.pieces[job.column];
    ring.loaded(i);
    ring.store(i, in_frame(piece.base, piece.frame_stride, move_at(p, job.row).dst), piece.bytes);
    // The next load goes to the stage of the store before this one.
    ring.wait_read();
    load();
  }
  ring.finish();
#endif
}

// Fills frames with zeros.
KVP_KERNEL(kvp_zero, ZeroParams) {
  for (Jobs job(p.n_frames, p.n_pieces); job.more(); job.next()) {
    const Piece piece = p.pieces[job.column];
    u8* to = in_frame(piece.base, piece.frame_stride, p.frames[job.row]);
    clear_bytes<THREADS>(to, piece.bytes, p.unit, threadIdx.x);
  }
}

// Packs frames, one after another, or unpacks them.
KVP_KERNEL(kvp_pack, PackParams) {
  const bool is_out = p.way == WAY_OUT;
  for (Jobs job(p.n_frames, p.n_pieces); job.more(); job.next()) {
    const Piece piece = p.pieces[job.column];
    u8* inside = in_frame(piece.base, piece.frame_stride, p.frames[job.row]);
    u8* packed = p.packed + (u64(job.row) * p.packed_stride + piece.packed_at);
    copy_bytes<THREADS>(is_out ? inside : packed, is_out ? packed : inside, piece.bytes, p.unit, threadIdx.x);
  }
}

// Copies rows unconverted to or from their slots: one warp per K or V of one token.
KVP_KERNEL(kvp_rows, RowsParams) {
  const bool two = p.v != nullptr, is_out = p.way == WAY_OUT;
  const u32 jobs = two ? 2 * p.n_tokens : p.n_tokens;
  const u32 step = gridDim.x * (THREADS / WARP);
  for (u32 job = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; job < jobs; job += step) {
    const u32 token = two ? job >> 1 : job;
    const bool is_v = two && (job & 1);
    const i64 slot = p.slots[token];
    if (slot < 0) continue;
    const u32 frame = u32(slot) / p.block_tokens;
    const u32 offset = u32(slot) - frame * p.block_tokens;
    u8* outside = (is_v ? p.v : p.k) + u64(token) * (is_v ? p.v_stride : p.k_stride);
    const Lane lane = is_v ? p.v_lane : p.k_lane;
    u8* inside = in_frame(lane.base, lane.frame_stride, frame) + u64(offset) * p.row_bytes;
    copy_bytes<WARP>(is_out ? inside : outside, is_out ? outside : inside, p.row_bytes, p.unit, threadIdx.x & (WARP - 1));
  }
}

// Converts rows of values to codes, and back.
KVP_KERNEL(kvp_quantise, QuantParams) { quantise(p, p.code_type, p.rows.row_type, p.rows.unit); }
KVP_KERNEL(kvp_dequantise, QuantParams) { dequantise(p, p.code_type, p.rows.row_type, p.rows.unit); }

// Patches block tables in device memory: rewrites the entries whose blocks moved.
KVP_KERNEL(kvp_patch, PatchParams) {
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < p.n; i += gridDim.x * THREADS) {
    const MovedEntry entry = p.entries[i];
    p.table[u64(entry.row) * p.row_stride + entry.column] = entry.frame;
  }
}
