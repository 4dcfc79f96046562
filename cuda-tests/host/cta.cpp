// See cta.h. Fibers use `ucontext`; their stacks are reused from one CTA to the next.
#include "cta.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {

thread_local Dim thread_index, block_index, block_dim, grid_dim;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned WARP = 32;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* fake_stack = nullptr;  // of the sanitizer
  bool is_done = false;
};

// A shuffle of a warp in progress. `turn` is incremented once all lanes have passed their value,
// and again once all have read one.
struct Warp {
  unsigned arrived = 0;
  unsigned long turn = 0;
  uint32_t values[WARP];
};

// The CTA that runs on this host thread.
struct Cta {
  const Kernel* kernel;
  void** arguments;
  ucontext_t scheduler;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned current = 0, live = 0;
  bool has_fibers = false;
};

thread_local Cta cta;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "shim: %s, CTA %u: %s\n", cta.kernel->name, block_index.x, what);
  abort();
}

// Report a switch of stacks to the sanitizer, before and after.
void leaving([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* to, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, to, bytes);
#endif
}
void entered([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** from, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, from, bytes);
#endif
}

void resume(unsigned index) {
  Fiber& fiber = cta.fibers[index];
  cta.current = index;
  thread_index = Dim{index, 0, 0};
  leaving(&cta.scheduler_fake_stack, fiber.stack.get(), STACK_BYTES);
  swapcontext(&cta.scheduler, &fiber.context);
  entered(cta.scheduler_fake_stack, nullptr, nullptr);
}

void give_way() {
  Fiber& fiber = cta.fibers[cta.current];
  leaving(&fiber.fake_stack, cta.scheduler_stack, cta.scheduler_stack_bytes);
  swapcontext(&fiber.context, &cta.scheduler);
  entered(fiber.fake_stack, &cta.scheduler_stack, &cta.scheduler_stack_bytes);
}

void fiber_main() {
  entered(nullptr, &cta.scheduler_stack, &cta.scheduler_stack_bytes);
  cta.kernel->call(cta.arguments);
  Fiber& fiber = cta.fibers[cta.current];
  fiber.is_done = true;
  cta.live--;
  // The fiber's frames are dead: null frees its fake stack.
  leaving(nullptr, cta.scheduler_stack, cta.scheduler_stack_bytes);
  swapcontext(&fiber.context, &cta.scheduler);
  fail("a finished thread was resumed");
}

// Waits until all lanes of the mask have arrived.
void warp_barrier(uint32_t members) {
  Warp& warp = cta.warps[thread_index.x / WARP];
  const unsigned long turn = warp.turn;
  if (++warp.arrived == unsigned(__builtin_popcount(members))) {
    warp.arrived = 0;
    warp.turn++;
    return;
  }
  while (warp.turn == turn) give_way();
}

void run_fibers(bool is_descending) {
  const unsigned threads = block_dim.x;
  if (cta.fibers.size() < threads) cta.fibers.resize(threads);
  cta.warps.assign((threads + WARP - 1) / WARP, Warp{});
  cta.live = threads;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = cta.fibers[i];
    // Not cleared: a kernel that reads what it did not write must see garbage.
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    fiber.is_done = false;
    fiber.fake_stack = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  while (cta.live > 0) {
    const unsigned live = cta.live;
    unsigned long arrivals = 0, before = 0;
    for (const Warp& warp : cta.warps) before += warp.turn * WARP + warp.arrived;
    for (unsigned i = 0; i < threads; i++) {
      const unsigned index = is_descending ? threads - 1 - i : i;
      if (!cta.fibers[index].is_done) resume(index);
    }
    for (const Warp& warp : cta.warps) arrivals += warp.turn * WARP + warp.arrived;
    if (live == cta.live && arrivals == before) fail("some lanes never reach a shuffle");
  }
}

}  // namespace

uint32_t shuffle_xor(uint32_t members, uint32_t value, unsigned mask) {
  if (!cta.has_fibers) fail("a shuffle in a launch that is declared to have none");
  const unsigned lane = thread_index.x % WARP;
  if (!(members >> lane & 1) || !(members >> (lane ^ mask) & 1)) fail("a shuffling lane is not in its mask");
  Warp& warp = cta.warps[thread_index.x / WARP];
  warp.values[lane] = value;
  warp_barrier(members);
  const uint32_t theirs = warp.values[lane ^ mask];
  warp_barrier(members);
  return theirs;
}

void run_cta(const Kernel& kernel, Dim grid, Dim block, Dim index, void** arguments, bool is_descending) {
  grid_dim = grid;
  block_dim = block;
  block_index = index;
  cta.kernel = &kernel;
  cta.arguments = arguments;
  cta.has_fibers = kernel.is_cooperative(arguments);
  if (cta.has_fibers) {
    run_fibers(is_descending);
    return;
  }
  for (unsigned i = 0; i < block.x; i++) {
    thread_index = Dim{is_descending ? block.x - 1 - i : i, 0, 0};
    kernel.call(arguments);
  }
}

}  // namespace shim
