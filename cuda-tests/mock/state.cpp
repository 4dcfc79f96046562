// The machine itself, and the checks that every call makes first.
#include "state.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace mock {
thread_local bool in_host_function = false;
thread_local Device* current = nullptr;
thread_local Call* calling = nullptr;
thread_local uint64_t calls_here = 0;

Machine& machine() {
  // Never freed: the worker and the program's own threads may use it until the process ends.
  static Machine* the = [] {
    Machine* fresh = new Machine;
    for (int i = 0; i < 8; i++) fresh->devices[i].ordinal = i;
    if (const char* seed = getenv("KVP_MOCK_SEED")) fresh->random = strtoull(seed, nullptr, 0) * 2 + 1;
    return fresh;
  }();
  return *the;
}

void die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("mock CUDA: ", stderr);
  vfprintf(stderr, format, arguments);
  fputs("\n", stderr);
  va_end(arguments);
  fflush(stderr);
  abort();
}

// splitmix64: the same numbers on every platform, which std's distributions do not guarantee.
uint64_t random_below(uint64_t n) {
  uint64_t z = (machine().random += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) % n;
}

// CUDA, in cuda.h, of each of these: "This leaves the process in an inconsistent state and any
// further CUDA work will return the same error." So a call that is made to fail with one of them
// fails the context too.
static bool ends_contexts(int code) {
  enum { ECC_UNCORRECTABLE = 214, CONTAINED = 226, LAUNCH_TIMEOUT = 702, HARDWARE_STACK_ERROR = 714, INVALID_PC = 718, TENSOR_MEMORY_LEAK = 721 };
  return code == ECC_UNCORRECTABLE || code == CONTAINED || code == TENSOR_MEMORY_LEAK || code == ILLEGAL_ADDRESS || code == LAUNCH_TIMEOUT || code == LAUNCH_FAILED ||
         (code >= HARDWARE_STACK_ERROR && code <= INVALID_PC);
}

Call::Call(const char* name, unsigned needs) {
  // CUDA: a host function must not call CUDA; the call may fail with CUDA_ERROR_NOT_PERMITTED, or
  // worse. A program must not rely on that error, so the mock aborts.
  if (in_host_function) die("%s called from a host function, which must not call CUDA", name);
  lock = std::unique_lock<std::mutex>(machine().lock);
  calling = this;
  Machine& m = machine();
  m.calls[name]++;
  calls_here++;
  auto injected = m.injected.find(name);
  if (injected != m.injected.end() && (injected->second.always || injected->second.skip-- == 0)) {
    code = injected->second.code;
    if (!injected->second.always) m.injected.erase(injected);
    if (ends_contexts(code) && current) fail_device(*current, code);
    return;
  }
  // CUDA: before cuInit every other function fails with this code.
  if ((needs & INIT) && !m.initialised) { code = NOT_INITIALIZED; return; }
  device = current;
  if ((needs & CONTEXT) == CONTEXT) {
    if (!device) { code = INVALID_CONTEXT; return; }
    if (!device->retained) { code = CONTEXT_IS_DESTROYED; return; }
  }
  // CUDA, of errors like CUDA_ERROR_ILLEGAL_ADDRESS: every later call returns the same error until
  // the process ends.
  if ((needs & ALIVE) == ALIVE && device->failed) { code = device->failed; return; }
  if (needs & UNSAFE) code = unsafe_call();
}

Call::~Call() { calling = nullptr; }

static const char* const NAMES[KINDS] = {"stream", "event", "module", "graph", "executable graph", "device memory", "host memory",
                                         "registered memory", "reservation", "physical memory", "mapping", "context"};

Handle* use_handle(const void* raw, Kind kind, const char* function) {
  auto found = machine().handles.find(raw);
  if (found == machine().handles.end()) die("%s: %p is not a %s: never created here", function, raw, NAMES[kind]);
  Handle* handle = found->second.get();
  if (handle->kind != kind) die("%s: %p is a %s, not a %s", function, raw, NAMES[handle->kind], NAMES[kind]);
  if (!handle->alive) die("%s: the %s %p was destroyed before", function, NAMES[kind], raw);
  return handle;
}

void destroy(Handle* handle) {
  handle->alive = false;
  machine().live[handle->kind]--;
}
}  // namespace mock
