// The machine: devices, streams, events, and the one lock over all of it.
//
//   cu* call -> `Call` (lock, common checks) -> queue of a stream -> `schedule.cpp` runs it in steps
//
// Invariants:
// * everything in `Machine` is accessed under `machine().lock`; kernels and copies run under it
//   too, one step at a time; host functions run without it, on a thread of their own;
// * handles are addresses of objects that are never freed, so that the use of a destroyed one is
//   detected and aborts with a message;
// * a failed device runs nothing any more, and every call on its context returns the code of the
//   failure.
//
// | file | content |
// |---|---|
// | schedule, op | choice of the next step; one piece of work |
// | stream, event, launch, copy | enqueued operations |
// | region, memory, virtual, pointer, fault | owners of addresses; bad accesses |
// | capture | nodes of a capture, and calls that invalidate it; below stream and event |
// | graph | captures from begin to end, graphs and their launches; above them |
// | device, result, state | contexts, codes, common checks |
// | control | the interface for tests |
//
// Not detected: a host that accesses device memory directly; a kernel that accesses another
// device's memory without permission (copies are checked by device, kernels by page); weak memory,
// since one step runs at a time; orders of accesses within one CTA other than ascending and
// descending threads.
//
// A comment that starts with `CUDA:` paraphrases the driver API's documentation of the function:
// the rule that the code below it encodes. Where CUDA leaves a choice, the mock takes the one that
// is worst for the program, since a correct program must handle all. Misuse that CUDA calls
// undefined behaviour (a destroyed handle, a pinned buffer freed during a copy) aborts.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>

#include "op.h"
#include "result.h"

#define API extern "C" __attribute__((visibility("default"))) int

namespace mock {
struct Capture;
struct Node;

enum Kind { STREAM, EVENT, MODULE, GRAPH, EXEC, DEVICE_MEMORY, HOST_MEMORY, REGISTERED, RESERVATION, PHYSICAL, MAPPING, PRIMARY, KINDS };

struct Handle {
  Kind kind;
  bool alive = true;
  explicit Handle(Kind kind) : kind(kind) {}
  virtual ~Handle() = default;
};

struct Stream : Handle {
  Device* device;
  uint64_t id;          // in the order of creation
  int priority;         // 0 is the lowest, -5 the greatest
  bool blocking;        // ordered with the legacy stream
  uint64_t rank = 0;    // of the schedule by ranks
  std::deque<OpRef> queue;
  MarkRef last;         // of the operation that was enqueued last
  Capture* capture = nullptr;
  unsigned lane = 0;        // chooses the hardware queue
  bool alone = false;       // never shares a hardware queue
  std::vector<Node*> tail;  // while capturing: the nodes that the next node depends on
  Stream(Device* device, uint64_t id, int priority, bool blocking)
      : Handle(STREAM), device(device), id(id), priority(priority), blocking(blocking) {}
};

struct Event : Handle {
  Device* device;
  unsigned flags;
  MarkRef record;               // of the latest record; null before the first
  Capture* capture = nullptr;   // set if the latest record was captured
  std::vector<Node*> nodes;
  Event(Device* device, unsigned flags) : Handle(EVENT), device(device), flags(flags) {}
};

struct Device {
  int ordinal = 0;
  int failed = 0;  // sticky
  size_t capacity = size_t(4) << 30, used = 0;
  size_t small = 0;  // bytes of small allocations, in slabs (memory.cpp)
  int major = 9, minor = 0, processors = 4, compute_mode = 0;
  bool virtual_memory = true, pools = true, reaches_pages = true;
  bool stopped = false;  // makes no progress, except on streams that are `alone`
  unsigned retained = 0;
  std::set<int> peers;  // ordinals of devices whose memory this device's context may access
  Stream* legacy = nullptr;
};

enum class Style { Fifo, Random, Lazy, Starve, Lowest, Ranks };

// Choices that CUDA leaves to the driver and the device; a test sets them (control.cpp).
//
// | choice | rule |
// |---|---|
// | granularity | cuMemGetAllocationGranularity: 2 MiB on every device so far |
// | queue_limit | a stream takes about a thousand operations; a call that enqueues one more blocks until the device has completed one |
// | connections | streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS: 8, at most 32): operations of streams that share one start in the order in which they were enqueued. 0: each stream has its own |
// | stalls | a call that allocates, frees, maps or unmaps may wait for all work of the device, or, if it concerns host memory, of all devices |
// | hang | a device that waits for a failed one fails too, or waits for ever (schedule.cpp) |
// | compilation | cuModuleLoadDataEx: the code with which the compilation of PTX fails, or 0 |
// | refused | cuMemCreate: a device with the attribute for handles (1) or RDMA (2) may refuse them nevertheless |
// | Device::stopped | a kernel may take any time, and so no operation has to begin or end; calls that do not wait go on. A call that waits returns at last: it ends the stop |
struct Rules {
  size_t granularity = size_t(2) << 20;
  unsigned queue_limit = 1000, connections = 0;
  bool stalls = false, hang = false;
  int compilation = 0;
  unsigned refused = 0;
};

struct Injected { unsigned skip; int code; bool always; };

struct Machine {
  std::mutex lock;
  std::condition_variable changed;
  bool initialised = false, paused = false;
  int version = 12080, count = 2;
  Device devices[8];
  std::vector<Stream*> streams;  // with work, or alive
  std::unordered_map<const void*, std::unique_ptr<Handle>> handles;
  long live[KINDS] = {};
  std::vector<Capture*> captures;  // begun and not ended
  Rules rules;
  // the schedule
  Style style = Style::Random;
  Stream* victim = nullptr;
  uint64_t random = 1, ticks = 0, enqueued = 0, ids = 0, trace = 1469598103934665603ull, change_at = 0;
  unsigned callbacks = 0;  // host functions handed over and not returned
  // requests of tests
  std::map<std::string, Injected> injected;
  std::map<std::string, uint64_t> calls;
  // Since the seed was set: kernel, CTAs, threads, shared memory, stream.
  std::set<std::tuple<std::string, unsigned, unsigned, unsigned, uint64_t>> launches;
};

Machine& machine();
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t random_below(uint64_t n);

// Preconditions of a call, besides not being made from a host function.
enum Needs : unsigned {
  NOTHING = 0,
  INIT = 1,      // cuInit was called
  CONTEXT = 3,   // a context is current
  ALIVE = 7,     // and has not failed
  UNSAFE = 8,    // "potentially unsafe" during a capture: see capture.cpp
};

struct Call {
  std::unique_lock<std::mutex> lock;
  Device* device = nullptr;
  int code = OK;
  Call(const char* name, unsigned needs);
  ~Call();
};
// The innermost call of this thread.
extern thread_local Call* calling;
// Number of calls that this thread has made.
extern thread_local uint64_t calls_here;
#define ENTER(needs)              \
  ::mock::Call call(__func__, needs); \
  if (call.code) return call.code

// True while this thread runs a host function.
extern thread_local bool in_host_function;
extern thread_local Device* current;

// Handles. `use` aborts if `raw` was never created, is of another kind, or was destroyed.
template <class T> T* adopt(T* object) {
  machine().handles.emplace(object, std::unique_ptr<Handle>(object));
  machine().live[object->kind]++;
  return object;
}
Handle* use_handle(const void* raw, Kind kind, const char* function);
template <class T> T* use(const void* raw, Kind kind, const char* function) { return static_cast<T*>(use_handle(raw, kind, function)); }
void destroy(Handle* handle);

// stream.cpp: returns the stream of a handle; null and 1 are the legacy stream of the current
// context, 2 is the per-thread one.
Stream* stream_of(void* raw, Call& call, const char* function);
Stream* new_stream(Device* device, int priority, bool blocking);
// Removes a destroyed stream from the schedule once its work is done.
void forget_if_done(Stream* stream);
// Appends an operation to the stream, or to the graph that the stream captures.
int enqueue(Stream* stream, OpRef op);

// capture.cpp
// Returns true if a use of the stream would include captured streams.
bool is_implied(const Stream* stream);
// Returns CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, and invalidates the captures, if a wait for the stream or
// a query of it would include captured streams.
int implied_capture(const Stream* stream);
int unsafe_call();
void invalidate(Capture* capture);
int captured(Stream* stream, OpRef op);
void record_captured(Event* event, Stream* stream);
int wait_captured(Stream* stream, Event* event);

// schedule.cpp
void start_worker();
bool step_one(Stream* wanted);
// Completes the stream's first operation.
void finish_head(Stream* stream);
bool step_stream(Stream* stream);
// Waits until `done`, running the device meanwhile. Returns the device's failure code, if it fails.
template <class P> int until(Call& call, Device* device, Stream* wanted, P done);
bool wait_a_little(Call& call, Stream* wanted, unsigned& idle_ms);
void call_back(std::function<void()> function);
void run_callbacks_out(std::unique_lock<std::mutex>& lock);
void fail_device(Device& device, int code);
// As `until`, and also runs a paused machine, whose only driver is the thread that waits here.
int drive(Call& call, Device* device, Stream* wanted, const std::function<bool()>& done);
// Waits for all work of the device, if calls like this one stall it.
void stall(Call& call, Device* device);
// The same for all devices: host memory is accessible from all of them.
void stall_all(Call& call);
// Waits for the work that all streams of the device hold now. Work enqueued later is not included:
// the wait might never end.
int until_all_done(Call& call, Device* device);
// The same, by `drive`.
int drive_all(Call& call, Device* device);

template <class P> int until(Call& call, Device* device, Stream* wanted, P done) {
  unsigned idle_ms = 0;
  while (!done()) {
    if (device->failed) return device->failed;
    wait_a_little(call, wanted, idle_ms);
  }
  return OK;
}
}  // namespace mock
