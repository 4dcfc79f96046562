// Copies through shared memory by bulk copies (compute capability 9.0), issued by one thread.
//
// The bytes pass through a ring of stages of one piece each. Loads run up to `STAGES - 1` pieces
// ahead; a stage is loaded again when the store out of it has read it.
//
//   load(i)   global -> stage i % STAGES          complete when `loaded(i)` returns
//   store(i)  stage i % STAGES -> global          has read its stage when `wait_read` returns
//
// On the host the copies are deferred, or done at once, so that a missing wait gives wrong bytes.
#pragma once

#include "bytes.h"

constexpr u32 STAGES = 4;
constexpr u32 BULK_THREADS = 32;
constexpr u32 BULK_SHARED_BYTES = STAGES * PIECE_BYTES_MAX;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVP_HAS_BULK 1
#define KVP_SHARED(memory, marks)           \
  extern __shared__ __align__(128) u8 memory[]; \
  __shared__ __align__(8) u64 marks[STAGES]

struct Ring {
  u32 stages, barriers;  // addresses in shared memory

  __device__ __forceinline__ Ring(u8* memory, u64* marks)
      : stages(u32(__cvta_generic_to_shared(memory))), barriers(u32(__cvta_generic_to_shared(marks))) {
#pragma unroll
    for (u32 i = 0; i < STAGES; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    // The barriers are visible to the engine that does the copies.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  __device__ __forceinline__ void load(u32 i, const u8* from, u32 bytes) {
    const u32 at = i % STAGES, barrier = barriers + 8 * at;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stages + at * PIECE_BYTES_MAX),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
  }

  __device__ __forceinline__ void loaded(u32 i) {
    const u32 barrier = barriers + 8 * (i % STAGES), parity = i / STAGES & 1;
    u32 done = 0;
    while (!done) {
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(barrier), "r"(parity)
                   : "memory");
    }
  }

  __device__ __forceinline__ void store(u32 i, u8* to, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(stages + i % STAGES * PIECE_BYTES_MAX), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Waits until all stores but the last one have read their stages.
  __device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }

  // Waits until all stores are complete.
  __device__ __forceinline__ void finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
};

#elif defined(KVP_HOST)
#define KVP_HAS_BULK 1
#define KVP_SHARED(memory, marks)                                  \
  alignas(128) static thread_local u8 memory[BULK_SHARED_BYTES]; \
  static thread_local u64 marks[STAGES]

struct Ring {
  struct Part {
    const u8* from;
    u8* to;
    u32 bytes;
    bool done;
  };
  u8* memory;
  Part loads[STAGES], stores[2];
  u32 n_stores = 0;
  bool late;  // loads are done when they are waited for, not when they are issued

  Ring(u8* memory, u64*) : memory(memory), loads{}, stores{}, late(blockIdx.x & 1) {}

  static void run(Part& part) {
    if (!part.done) memcpy(part.to, part.from, part.bytes);
    part.done = true;
  }
  u8* stage(u32 i) { return memory + i % STAGES * PIECE_BYTES_MAX; }
  void load(u32 i, const u8* from, u32 bytes) {
    Part& part = loads[i % STAGES];
    part = {from, stage(i), bytes, false};
    if (!late) run(part);
  }
  void loaded(u32 i) { run(loads[i % STAGES]); }
  void store(u32 i, u8* to, u32 bytes) {
    // The oldest of more than two stores is complete at the latest now.
    if (n_stores >= 2) run(stores[n_stores % 2]);
    stores[n_stores++ % 2] = {stage(i), to, bytes, false};
  }
  void wait_read() {
    if (n_stores >= 2) run(stores[n_stores % 2]);
  }
  void finish() {
    for (u32 i = n_stores < 2 ? 0 : n_stores - 2; i < n_stores; i++) run(stores[i % 2]);
  }
};
#endif
