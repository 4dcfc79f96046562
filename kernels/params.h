// Parameters of each kernel launch: one struct, passed by value. `cuda/src/params.rs` declares the
// same structs and asserts the same sizes and offsets; the field names agree.
//
// A *piece* is at most 16 KiB of one plane's tile. The host splits a layout's planes into pieces
// once, so that layer-first and block-first layouts, joined and separate planes, planes of scales
// and adopted tensors all use one table here. A *lane* is the start of K or V of one layer (or of
// their scales) in frame 0; in frame f it starts `f * frame_stride` bytes later.
//
// The host guarantees for every launch:
//   - `unit` is 16, 4 or 1, and divides every address, stride and byte length that the kernel moves
//     (for the converting kernels: of the codes and the caller's rows, and head_dim);
//   - elements of more than one byte, and scales, are aligned to their size;
//   - slots and frames exist; frames * block_tokens < 2^32; tokens * 2 * heads, moves and packed
//     frames < 2^31;
//   - 256 threads per CTA, one dimension, any number of CTAs; kvp_copy: a multiple of 128 up to 1024;
//     kvp_copy_bulk: 32, 64 KiB of dynamic shared memory, and a unit of 16.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDACC_RTC__ // has no offsetof, and no header that defines one
#define KVP_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define KVP_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif
#define KVP_OFFSET(type, field, offset) static_assert(KVP_OFFSETOF(type, field) == offset, #type "." #field)
#define KVP_SIZE(type, bytes) static_assert(sizeof(type) == bytes, #type)

// Maximum size of a piece in bytes.
constexpr u32 PIECE_BYTES_MAX = 16 * 1024;

struct Piece {
  u64 base;          // address in frame 0
  u64 frame_stride;  // bytes from one frame to the next
  u32 bytes;
  u32 packed_at;     // offset in a frame's packed form
};
KVP_SIZE(Piece, 24);
KVP_OFFSET(Piece, frame_stride, 8);
KVP_OFFSET(Piece, bytes, 16);
KVP_OFFSET(Piece, packed_at, 20);

struct Move {
  u32 src, dst;  // frames
};
KVP_SIZE(Move, 8);
KVP_OFFSET(Move, dst, 4);

struct Lane {
  u64 base;
  u64 frame_stride;
};
KVP_SIZE(Lane, 16);
KVP_OFFSET(Lane, frame_stride, 8);

// Number of moves that a launch passes as parameters.
constexpr u32 MOVES_INLINE = 256;

struct CopyParams {
  const Piece* pieces;
  const Move* moves;  // null: they are in `few`
  u32 n_pieces, n_moves, unit, reserved;
  Move few[MOVES_INLINE];
};
KVP_SIZE(CopyParams, 2080);
KVP_OFFSET(CopyParams, few, 32);
KVP_OFFSET(CopyParams, moves, 8);
KVP_OFFSET(CopyParams, n_pieces, 16);
KVP_OFFSET(CopyParams, n_moves, 20);
KVP_OFFSET(CopyParams, unit, 24);

struct ZeroParams {
  const Piece* pieces;
  const u32* frames;
  u32 n_pieces, n_frames, unit, reserved;
};
KVP_SIZE(ZeroParams, 32);
KVP_OFFSET(ZeroParams, frames, 8);
KVP_OFFSET(ZeroParams, n_pieces, 16);
KVP_OFFSET(ZeroParams, n_frames, 20);
KVP_OFFSET(ZeroParams, unit, 24);

// Direction of a copy.
enum Way : u32 {
  WAY_IN = 0,   // to the frames
  WAY_OUT = 1,  // from the frames
};

struct PackParams {
  const Piece* pieces;
  const u32* frames;
  u8* packed;
  u64 packed_stride;  // bytes from one packed frame to the next
  u32 n_pieces, n_frames, unit;
  Way way;
};
KVP_SIZE(PackParams, 48);
KVP_OFFSET(PackParams, frames, 8);
KVP_OFFSET(PackParams, packed, 16);
KVP_OFFSET(PackParams, packed_stride, 24);
KVP_OFFSET(PackParams, n_pieces, 32);
KVP_OFFSET(PackParams, n_frames, 36);
KVP_OFFSET(PackParams, unit, 40);
KVP_OFFSET(PackParams, way, 44);

// Type of the elements of the caller's rows that are converted.
enum RowType : u32 { ROWS_BF16 = 0, ROWS_F16 = 1, ROWS_F32 = 2 };

// Type of the codes in the frames.
enum CodeType : u32 { CODES_E4M3 = 0, CODES_E5M2 = 1, CODES_INT8 = 2 };

// Rows of one layer in the caller's memory: [tokens][row].
struct RowsParams {
  u8* k;
  u8* v;              // null for a latent layout, which has only K
  u64 k_stride;       // bytes from one token's row to the next token's
  u64 v_stride;
  const i64* slots;   // one per token; negative: skipped
  Lane k_lane;
  Lane v_lane;        // joined planes: K's lane plus half a tile
  u32 row_bytes;      // of a row in the lane
  u32 block_tokens, n_tokens, unit;
  Way way;            // of kvp_rows
  u32 row_type;       // converting kernels only
};
KVP_SIZE(RowsParams, 96);
KVP_OFFSET(RowsParams, v, 8);
KVP_OFFSET(RowsParams, k_stride, 16);
KVP_OFFSET(RowsParams, v_stride, 24);
KVP_OFFSET(RowsParams, slots, 32);
KVP_OFFSET(RowsParams, k_lane, 40);
KVP_OFFSET(RowsParams, v_lane, 56);
KVP_OFFSET(RowsParams, row_bytes, 72);
KVP_OFFSET(RowsParams, block_tokens, 76);
KVP_OFFSET(RowsParams, n_tokens, 80);
KVP_OFFSET(RowsParams, unit, 84);
KVP_OFFSET(RowsParams, way, 88);
KVP_OFFSET(RowsParams, row_type, 92);

// Scaling of codes to values.
enum ScaleMode : u32 {
  SCALES_UNIT = 0,            // value = code
  SCALES_PER_HEAD = 1,        // value = code * k_scales[head]
  SCALES_PER_TOKEN_HEAD = 2,  // value = code * the scale in the scale lane; stores write it
};

struct QuantParams {
  RowsParams rows;            // rows.row_bytes = heads * head_dim
  const float* k_scales;      // [heads] of this layer; SCALES_PER_HEAD only
  const float* v_scales;
  Lane k_scale_lane;          // [block_tokens][heads] in a tile; SCALES_PER_TOKEN_HEAD only
  Lane v_scale_lane;
  u32 heads, head_dim, mode, code_type;
};
KVP_SIZE(QuantParams, 160);
KVP_OFFSET(QuantParams, k_scales, 96);
KVP_OFFSET(QuantParams, v_scales, 104);
KVP_OFFSET(QuantParams, k_scale_lane, 112);
KVP_OFFSET(QuantParams, v_scale_lane, 128);
KVP_OFFSET(QuantParams, heads, 144);
KVP_OFFSET(QuantParams, head_dim, 148);
KVP_OFFSET(QuantParams, mode, 152);
KVP_OFFSET(QuantParams, code_type, 156);

// An entry of a block table, and the new frame of its block.
struct MovedEntry {
  u32 row, column;
  i32 frame;
};
KVP_SIZE(MovedEntry, 12);
KVP_OFFSET(MovedEntry, column, 4);
KVP_OFFSET(MovedEntry, frame, 8);

struct PatchParams {
  i32* table;
  const MovedEntry* entries;  // no two with the same row and column
  u32 row_stride;             // entries from one row to the next
  u32 n;
};
KVP_SIZE(PatchParams, 24);
KVP_OFFSET(PatchParams, entries, 8);
KVP_OFFSET(PatchParams, row_stride, 16);
KVP_OFFSET(PatchParams, n, 20);
