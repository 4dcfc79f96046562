// Functions by which tests control the machine, beside CUDA's own calls. src/mock.rs is the Rust
// side. Callable before cuInit.
#include "region.h"

namespace mock {
static Device& device(int ordinal) {
  if (ordinal < 0 || ordinal >= 8) die("there is no device %d", ordinal);
  return machine().devices[ordinal];
}

// Acts as a restart of the process, except for handles that the program holds: nothing is pending,
// and all marks are done.
static void revive(Device& device) {
  device.failed = 0;
  device.stopped = false;
  for (Stream* stream : machine().streams) {
    if (stream->device != &device) continue;
    for (OpRef& op : stream->queue) {
      if (op->is_bookkeeping()) op->step(device);
      op->mark->done = true;
    }
    stream->queue.clear();
  }
  machine().changed.notify_all();
}
}  // namespace mock

using namespace mock;

#define LOCKED std::unique_lock<std::mutex> lock(machine().lock)
#define CONTROL(type) extern "C" __attribute__((visibility("default"))) type

CONTROL(void) kvp_mock_seed(uint64_t seed) {
  LOCKED;
  machine().random = seed * 2 + 1;
  machine().trace = 1469598103934665603ull;
  machine().change_at = 0;
  machine().launches.clear();
  for (Stream* stream : machine().streams) stream->rank = (1 << 10) + random_below(1 << 20);
}

// Sets the schedule's `Style`; `victim` is the stream that Style::Starve delays.
CONTROL(void) kvp_mock_style(int style, void* victim) {
  LOCKED;
  machine().style = static_cast<Style>(style);
  machine().victim = victim ? use<Stream>(victim, STREAM, "kvp_mock_style") : nullptr;
  machine().changed.notify_all();
}

// Chooses what happens to a device that waits for a failed one: it fails too, or waits for ever.
CONTROL(void) kvp_mock_hang(int hangs) { LOCKED; machine().rules.hang = hangs != 0; }

// Sets the `Rules` other than `hang`, `compilation` and `refused`.
CONTROL(void) kvp_mock_rules(size_t granularity, unsigned queue_limit, unsigned connections, int stalls) {
  LOCKED;
  Rules& rules = machine().rules;
  rules.granularity = granularity, rules.queue_limit = queue_limit, rules.connections = connections, rules.stalls = stalls != 0;
  // By position: the ids depend on the streams that were created earlier in this process.
  unsigned lane = 0;
  for (Stream* stream : machine().streams) stream->lane = lane++;
}

// Makes every compilation fail with this code; 0: none.
CONTROL(void) kvp_mock_fail_compilation(int code) { LOCKED; machine().rules.compilation = code; }

// Chooses what cuMemCreate refuses: 1 handles, 2 RDMA.
CONTROL(void) kvp_mock_refuse(unsigned what) { LOCKED; machine().rules.refused = what; }

// Stops the device, or lets it go on.
CONTROL(void) kvp_mock_stop(int ordinal, int stops) {
  LOCKED;
  device(ordinal).stopped = stops != 0;
  machine().changed.notify_all();
}

// Gives a stream a hardware queue of its own.
CONTROL(void) kvp_mock_alone(void* raw) { LOCKED; use<Stream>(raw, STREAM, "kvp_mock_alone")->alone = true; }

CONTROL(void) kvp_mock_pause() { LOCKED; machine().paused = true; }

CONTROL(void) kvp_mock_resume() {
  LOCKED;
  machine().paused = false;
  machine().changed.notify_all();
}

// Runs up to `steps` steps on this thread, and waits for the host functions that they start.
// Returns the number of steps run.
CONTROL(uint64_t) kvp_mock_step(uint64_t steps) {
  LOCKED;
  uint64_t done = 0;
  for (; done < steps && step_one(nullptr); done++) run_callbacks_out(lock);
  return done;
}

// Runs up to `steps` steps of one stream, whatever the style.
CONTROL(uint64_t) kvp_mock_step_stream(void* raw, uint64_t steps) {
  LOCKED;
  Stream* stream = use<Stream>(raw, STREAM, "kvp_mock_step_stream");
  uint64_t done = 0;
  for (; done < steps && step_stream(stream); done++) run_callbacks_out(lock);
  return done;
}

// Fails the device permanently; code 0 revives it, so that later tests can run.
CONTROL(void) kvp_mock_fail(int ordinal, int code) {
  LOCKED;
  if (code) fail_device(device(ordinal), code);
  else revive(device(ordinal));
}

// Makes the call after `skip` more calls of `function` return `code` without any effect.
CONTROL(void) kvp_mock_fail_call(const char* function, unsigned skip, int code) {
  LOCKED;
  machine().injected[function] = {skip, code, false};
}

// Makes every call of `function` return `code` without any effect.
CONTROL(void) kvp_mock_fail_calls(const char* function, int code) {
  LOCKED;
  machine().injected[function] = {0, code, true};
}

// Writes the different launches since the seed was set, as lines of name, CTAs, threads, bytes and
// stream, and returns their length in bytes; only as much as fits is written.
CONTROL(size_t) kvp_mock_launches(char* to, size_t most) {
  LOCKED;
  std::string all;
  for (const auto& [name, grid, block, shared, stream] : machine().launches)
    all += name + " " + std::to_string(grid) + " " + std::to_string(block) + " " + std::to_string(shared) + " " + std::to_string(stream) + "\n";
  all.copy(to, most);
  return all.size();
}

CONTROL(uint64_t) kvp_mock_calls_here() { return calls_here; }
CONTROL(uint64_t) kvp_mock_calls(const char* function) { LOCKED; return machine().calls[function]; }
CONTROL(void) kvp_mock_set_version(int version) { LOCKED; machine().version = version; }
CONTROL(void) kvp_mock_set_devices(int count) { LOCKED; device(count ? count - 1 : 0), machine().count = count; }
CONTROL(void) kvp_mock_set_capability(int ordinal, int major, int minor) { LOCKED; device(ordinal).major = major, device(ordinal).minor = minor; }
CONTROL(void) kvp_mock_set_capacity(int ordinal, size_t bytes) { LOCKED; device(ordinal).capacity = bytes; }
CONTROL(void) kvp_mock_set_virtual_memory(int ordinal, int supported) { LOCKED; device(ordinal).virtual_memory = supported != 0; }
CONTROL(void) kvp_mock_set_compute_mode(int ordinal, int mode) { LOCKED; device(ordinal).compute_mode = mode; }
CONTROL(void) kvp_mock_set_reaches_pages(int ordinal, int supported) { LOCKED; device(ordinal).reaches_pages = supported != 0; }
CONTROL(void) kvp_mock_set_pools(int ordinal, int supported) { LOCKED; device(ordinal).pools = supported != 0; }
CONTROL(size_t) kvp_mock_used(int ordinal) { LOCKED; return device(ordinal).used; }
CONTROL(long) kvp_mock_live(int kind) { LOCKED; return kind >= 0 && kind < KINDS ? machine().live[kind] : -1; }

// Returns the number of operations in all queues.
CONTROL(uint64_t) kvp_mock_pending() {
  LOCKED;
  uint64_t pending = 0;
  for (const Stream* stream : machine().streams) pending += stream->queue.size();
  return pending;
}

CONTROL(void) kvp_mock_stats(uint64_t* enqueued, uint64_t* steps) {
  LOCKED;
  *enqueued = machine().enqueued;
  *steps = machine().ticks;
}

// Returns a hash of the sequence of streams scheduled since the seed: equal for equal schedules.
CONTROL(uint64_t) kvp_mock_trace() { LOCKED; return machine().trace; }

CONTROL(int) kvp_mock_priority(void* stream) { LOCKED; return use<Stream>(stream, STREAM, "kvp_mock_priority")->priority; }

CONTROL(void) kvp_mock_forget_injected() { LOCKED; machine().injected.clear(); }
