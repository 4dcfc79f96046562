// The schedule: chooses the stream that runs next, one step at a time, from a seed.
//
//   worker thread   ---+
//   waiting threads ---+--> step_one: pick a stream whose head may run, do one step (a CTA, a copy)
//   kvp_mock_step   ---+
//   host functions: on one thread of their own, without the lock, as in CUDA
//
// CUDA guarantees order within a stream and by events, and nothing else: any two operations without
// such an order may run in any order, or concurrently. So every choice among runnable heads is a
// legal execution. Priorities are hints that CUDA may ignore; only the deliberately hostile styles
// use them.
//
// | style  | next step |
// |---|---|
// | fifo   | the operation that was enqueued first, to its end: a program without any events still works |
// | random | any |
// | lazy   | none, until a thread waits (or has queried an incomplete event); then only steps that it needs |
// | starve | any stream but one, which runs when no other can |
// | lowest | any but the streams of the lowest priority |
// | ranks  | the highest of random ranks; now and then the running stream falls to the lowest (Burckhardt et al., ASPLOS 2010) |
//
// One seed gives one schedule if the worker is paused, one thread makes all calls, and
// `kvp_mock_step` drives. With the worker running, or calls from several threads, the operating
// system affects the schedule, and a seed only makes it likely.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "state.h"

namespace mock {
namespace {
// Never freed, because the threads that use it never end.
std::deque<std::function<void()>>& callbacks = *new std::deque<std::function<void()>>;

void callback_loop() {
  in_host_function = true;
  Machine& m = machine();
  std::unique_lock<std::mutex> lock(m.lock);
  for (;;) {
    m.changed.wait(lock, [] { return !callbacks.empty(); });
    auto function = std::move(callbacks.front());
    callbacks.pop_front();
    lock.unlock();
    function();
    lock.lock();
    m.callbacks--;
    m.changed.notify_all();
  }
}

// Returns another stream of the same hardware queue whose head was enqueued before this stream's.
Stream* ahead(const Stream& stream) {
  unsigned connections = machine().rules.connections;
  if (!connections || stream.alone || stream.queue.empty()) return nullptr;
  Stream* first = nullptr;
  for (Stream* other : machine().streams) {
    if (other == &stream || other->alone || other->device != stream.device || other->queue.empty()) continue;
    if (other->lane % connections != stream.lane % connections || other->queue.front()->has_begun) continue;
    uint64_t seq = other->queue.front()->seq;
    if (seq < stream.queue.front()->seq && (!first || seq < first->queue.front()->seq)) first = other;
  }
  return first;
}

bool runnable(const Stream& stream) {
  if (stream.device->failed || (stream.device->stopped && !stream.alone) || stream.queue.empty() || !stream.queue.front()->may_run()) return false;
  return stream.queue.front()->has_begun || !ahead(stream);
}

// Returns the stream that must run next for `wanted` to make progress: itself, or the one that its
// head waits for.
Stream* needed(Stream* wanted) {
  for (int depth = 0; wanted && depth < 64; depth++) {
    if (wanted->queue.empty()) return nullptr;
    if (runnable(*wanted)) return wanted;
    Stream* next = ahead(*wanted);
    for (const MarkRef& other : wanted->queue.front()->after)
      if (!other->done) next = other->stream;
    if (next == wanted) return nullptr;
    wanted = next;
  }
  return nullptr;
}

Stream* pick(Stream* wanted) {
  Machine& m = machine();
  std::vector<Stream*> can;
  for (Stream* stream : m.streams)
    if (runnable(*stream)) can.push_back(stream);
  if (can.empty()) return nullptr;
  std::vector<Stream*> rather;
  switch (m.style) {
    case Style::Fifo: {
      Stream* first = can[0];
      for (Stream* stream : can)
        if (stream->queue.front()->seq < first->queue.front()->seq) first = stream;
      return first;
    }
    case Style::Random: break;
    case Style::Lazy:
      if (Stream* stream = needed(wanted)) return stream;
      break;
    case Style::Starve:
      for (Stream* stream : can)
        if (stream != m.victim) rather.push_back(stream);
      break;
    case Style::Lowest:
      for (Stream* stream : can)
        if (stream->priority < 0) rather.push_back(stream);
      break;
    case Style::Ranks: {
      Stream* top = can[0];
      for (Stream* stream : can)
        if (stream->rank > top->rank) top = stream;
      if (m.ticks >= m.change_at) {
        m.change_at = m.ticks + 1 + random_below(60);
        top->rank = random_below(1 << 10);  // below every initial rank
      }
      return top;
    }
  }
  if (rather.empty()) rather = can;
  return rather[random_below(rather.size())];
}

// Propagates a failure to devices that wait for the failed one. CUDA does not document the
// behaviour of the waiting device, so both are legal: it fails as well, so that waiting threads get
// an error; or it waits for ever (`Rules::hang`), and so does a thread that waits for it.
bool spread_failure() {
  if (machine().rules.hang) return false;
  bool spread = false;
  for (Stream* stream : machine().streams) {
    if (stream->device->failed || stream->queue.empty()) continue;
    for (const MarkRef& other : stream->queue.front()->after)
      if (!other->done && other->stream && other->stream->device->failed && !stream->device->failed) {
        fail_device(*stream->device, other->stream->device->failed);
        spread = true;
      }
  }
  return spread;
}

// Returns true if the head of some stream of a device waits for a failed device.
bool waits_for_failed() {
  for (Stream* stream : machine().streams) {
    if (stream->device->failed || stream->queue.empty()) continue;
    if (stream->queue.front()->needs_failed()) return true;
    for (const MarkRef& other : stream->queue.front()->after)
      if (!other->done && other->stream && other->stream->device->failed) return true;
  }
  return false;
}

// Lets stopped devices go on. Returns true if there were any.
bool end_stops() {
  bool any = false;
  for (Device& device : machine().devices) {
    any |= device.stopped;
    device.stopped = false;
  }
  return any;
}

[[noreturn]] void die_of_deadlock() {
  for (Stream* stream : machine().streams)
    if (!stream->queue.empty())
      fprintf(stderr, "mock CUDA: device %d, stream %llu: %zu operations, the first is %s\n", stream->device->ordinal,
              (unsigned long long)stream->id, stream->queue.size(), stream->queue.front()->what());
  die("a thread waits, and no stream can run: deadlock");
}

void worker_loop() {
  Machine& m = machine();
  for (;;) {
    std::unique_lock<std::mutex> lock(m.lock);
    bool did = false;
    if (!m.paused && m.style != Style::Lazy)
      for (uint64_t i = 0, n = 1 + random_below(8); i < n; i++) did |= step_one(nullptr);
    if (!did) m.changed.wait_for(lock, std::chrono::milliseconds(20));
    lock.unlock();
    std::this_thread::yield();
  }
}
}  // namespace

void start_worker() {
  std::thread(worker_loop).detach();
  std::thread(callback_loop).detach();
}

void call_back(std::function<void()> function) {
  machine().callbacks++;
  callbacks.push_back(std::move(function));
  machine().changed.notify_all();
}

void run_callbacks_out(std::unique_lock<std::mutex>& lock) {
  machine().changed.wait(lock, [] { return machine().callbacks == 0; });
}

void finish_head(Stream* stream) {
  Mark& mark = *stream->queue.front()->mark;
  mark.done = true;
  mark.tick = machine().ticks;
  stream->queue.pop_front();
  forget_if_done(stream);
  machine().changed.notify_all();
}

bool step_one(Stream* wanted) {
  Stream* stream = pick(wanted);
  return stream ? step_stream(stream) : spread_failure();
}

// Returns false if its head may not run.
bool step_stream(Stream* stream) {
  Machine& m = machine();
  if (!runnable(*stream)) return false;
  Op& op = *stream->queue.front();
  m.ticks++;
  // Uses the position, not the id, which depends on the streams created earlier in this process.
  uint64_t place = uint64_t(std::find(m.streams.begin(), m.streams.end(), stream) - m.streams.begin());
  m.trace = (m.trace ^ place) * 1099511628211ull;
  for (const char* c = op.what(); *c; c++) m.trace = (m.trace ^ uint8_t(*c)) * 1099511628211ull;
  try {
    op.has_begun = true;
    // Only a fifo machine finishes an operation that it has begun.
    bool finished = op.step(*stream->device);
    while (!finished && m.style == Style::Fifo && op.ready()) finished = op.step(*stream->device);
    if (finished) finish_head(stream);
  } catch (const Fault& fault) {
    fail_device(*stream->device, fault.code);
  }
  return true;
}

// One iteration of a waiting thread: a step, or a short sleep while a host function runs or the
// worker is paused.
bool wait_a_little(Call& call, Stream* wanted, unsigned& idle_ms) {
  Machine& m = machine();
  if (m.paused) {
    if (++idle_ms > 30000) die("a thread has waited for a paused device for 30 seconds");
    m.changed.wait_for(call.lock, std::chrono::milliseconds(1));
    return false;
  }
  if (step_one(wanted)) {
    call.lock.unlock();  // let other threads enqueue in between
    call.lock.lock();
    return true;
  }
  if (m.callbacks == 0) {
    if (end_stops()) return true;
    if (!m.rules.hang || !waits_for_failed()) die_of_deadlock();
    if (++idle_ms > 30000) die("a thread has waited for a failed device for 30 seconds");
  }
  m.changed.wait_for(call.lock, std::chrono::milliseconds(1));
  return false;
}

// CUDA: after such an error nothing runs on the device any more, and host functions are not called.
void fail_device(Device& device, int code) {
  if (!device.failed) device.failed = code;
  machine().changed.notify_all();
}

void stall(Call& call, Device* device) {
  if (machine().rules.stalls && device && !device->failed) drive_all(call, device);
}

void stall_all(Call& call) {
  for (Device& device : machine().devices)
    if (device.retained) stall(call, &device);
}

int drive_all(Call& call, Device* device) {
  std::vector<MarkRef> preceding;
  for (const Stream* stream : machine().streams)
    if (stream->device == device && stream->last) preceding.push_back(stream->last);
  return drive(call, device, nullptr, [&] {
    return std::all_of(preceding.begin(), preceding.end(), [](const MarkRef& mark) { return mark->done; });
  });
}

int drive(Call& call, Device* device, Stream* wanted, const std::function<bool()>& done) {
  if (!machine().paused) return until(call, device, wanted, done);
  while (!done()) {
    if (device->failed) return device->failed;
    if (step_one(wanted)) run_callbacks_out(call.lock);
    else if (end_stops()) continue;
    else if (!machine().rules.hang || !waits_for_failed()) die_of_deadlock();
    else return OK;
  }
  return OK;
}

int until_all_done(Call& call, Device* device) {
  std::vector<MarkRef> preceding;
  for (const Stream* stream : machine().streams)
    if (stream->device == device && stream->last) preceding.push_back(stream->last);
  return until(call, device, nullptr, [&] {
    for (const MarkRef& mark : preceding)
      if (!mark->done) return false;
    return true;
  });
}
}  // namespace mock
