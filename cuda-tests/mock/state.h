// The machine: devices, streams, events, and the one lock over all of it.
//
//   cu* call -> `Call` (lock, checks that every call makes) -> queue of a stream -> `schedule.cpp` runs it, a step at a time
//
// Invariants:
// * everything in `Machine` is read and written under `machine().lock`; kernels and copies run under it too, one step at a time,
//   host functions without it, on a thread of their own;
// * handles are addresses of objects that are never freed, so that a destroyed one is recognised: its use aborts with a message;
// * a device that has failed runs nothing any more, and every call on its context returns the code of the failure.
//
// | file | noun |
// |---|---|
// | schedule, op | whose turn it is; one piece of work |
// | stream, event, launch, copy | what is enqueued |
// | region, memory, virtual, pointer, fault | who owns an address; a bad access |
// | capture, graph | work for later |
// | device, result, state | contexts, codes, what every call checks |
// | control | what tests say |
//
// What it does not see: a host that touches device memory directly; a kernel that touches another device's memory without
// leave (copies are checked by device, kernels by page); weak memory, as one step runs at a time; the order of accesses
// within one CTA beside the first and the last thread going first.
//
// `CUDA:` before a comment stands for what the driver API's documentation says of the function, in our words: the rule that the
// code below it encodes. What CUDA leaves open is decided against the program, for a correct one must bear it. Misuse that CUDA calls undefined behaviour (a destroyed handle, a pinned buffer freed under a copy) aborts.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
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
  uint64_t rank = 0;    // of the schedule by priorities
  std::deque<OpRef> queue;
  MarkRef last;         // of the operation that was enqueued last
  Capture* capture = nullptr;
  std::vector<Node*> tail;  // while capturing: what the next node comes after
  Stream(Device* device, uint64_t id, int priority, bool blocking)
      : Handle(STREAM), device(device), id(id), priority(priority), blocking(blocking) {}
};

struct Event : Handle {
  Device* device;
  unsigned flags;
  MarkRef record;               // of the latest record; null before the first
  Capture* capture = nullptr;   // set where the latest record was captured
  std::vector<Node*> nodes;
  Event(Device* device, unsigned flags) : Handle(EVENT), device(device), flags(flags) {}
};

struct Device {
  int ordinal = 0;
  int failed = 0;  // sticky
  size_t capacity = size_t(4) << 30, used = 0;
  int major = 9, minor = 0, processors = 4;
  bool virtual_memory = true, pools = true;
  unsigned retained = 0;
  std::set<int> peers;  // whose memory this one's context may touch
  Stream* legacy = nullptr;
};

enum class Style { Fifo, Random, Lazy, Starve, Lowest, Ranks };

struct Injected { unsigned skip; int code; };

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
  // the schedule
  Style style = Style::Random;
  Stream* victim = nullptr;
  uint64_t random = 1, ticks = 0, enqueued = 0, ids = 0, trace = 1469598103934665603ull, change_at = 0;
  unsigned callbacks = 0;  // host functions handed over and not returned
  // what tests ask for
  std::map<std::string, Injected> injected;
  std::map<std::string, uint64_t> calls;
};

Machine& machine();
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t random_below(uint64_t n);

// What a call needs, beside that nobody calls CUDA from a host function.
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
};
#define ENTER(needs)              \
  ::mock::Call call(__func__, needs); \
  if (call.code) return call.code

// True while this thread runs a host function.
extern thread_local bool in_host_function;
extern thread_local Device* current;

// Handles. `use` aborts where `raw` was never given out, is of another kind, or was destroyed.
template <class T> T* adopt(T* object) {
  machine().handles.emplace(object, std::unique_ptr<Handle>(object));
  machine().live[object->kind]++;
  return object;
}
Handle* use_handle(const void* raw, Kind kind, const char* function);
template <class T> T* use(const void* raw, Kind kind, const char* function) { return static_cast<T*>(use_handle(raw, kind, function)); }
void destroy(Handle* handle);

// stream.cpp: the stream behind a handle; null and 1 are the legacy stream of the current context, 2 is the thread's own.
Stream* stream_of(void* raw, Call& call, const char* function);
Stream* new_stream(Device* device, int priority, bool blocking);
// Takes a destroyed stream off the schedule once its work is done.
void forget_if_done(Stream* stream);
// Puts an operation behind all that is in the stream, or into the graph that the stream captures.
int enqueue(Stream* stream, OpRef op);

// capture.cpp
int unsafe_call();
void invalidate(Capture* capture);
int captured(Stream* stream, OpRef op);

// schedule.cpp
void start_worker();
bool step_one(Stream* wanted);
// The first operation of the stream is done.
void finish_head(Stream* stream);
bool step_stream(Stream* stream);
// Waits until `done`, running the device meanwhile. Returns the device's failure, should there be one.
template <class P> int until(Call& call, Device* device, Stream* wanted, P done);
bool wait_a_little(Call& call, Stream* wanted, unsigned& idle_ms);
void call_back(std::function<void()> function);
void run_callbacks_out(std::unique_lock<std::mutex>& lock);
void fail_device(Device& device, int code);
// Waits for what all streams of the device hold now. What others enqueue meanwhile is not waited for: it may never end.
int until_all_done(Call& call, Device* device);

template <class P> int until(Call& call, Device* device, Stream* wanted, P done) {
  unsigned idle_ms = 0;
  while (!done()) {
    if (device->failed) return device->failed;
    wait_a_little(call, wanted, idle_ms);
  }
  return OK;
}
}  // namespace mock
