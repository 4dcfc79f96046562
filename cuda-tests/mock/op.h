// What a stream's queue holds: one piece of device work, done in steps, so that the work of other streams comes between.
//
//   Mark   done or not: shared by the operation, the events that were recorded behind it, and whoever waits for it
//   Op     copy, fill, launch, host function, allocation, graph: `step` does a little and says whether all is done
//
// A step runs under the machine's lock. It reports a failure of the device by throwing `Fault`.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace mock {
struct Device;
struct Stream;

struct Mark {
  bool done = false;
  uint64_t tick = 0;         // when it was done, in steps of the machine
  Stream* stream = nullptr;  // whose queue it is in; streams are never freed, so this stays valid
};
using MarkRef = std::shared_ptr<Mark>;

struct Fault { int code; };

struct Op {
  uint64_t seq = 0;            // place in the order of enqueueing, over all streams
  MarkRef mark = std::make_shared<Mark>();
  std::vector<MarkRef> after;  // must be done before the first step
  virtual ~Op() = default;
  virtual const char* what() const = 0;
  virtual bool ready() const { return true; }
  virtual bool step(Device& device) = 0;
  // A copy for a replay; null where this kind cannot be captured.
  virtual std::unique_ptr<Op> again() const { return nullptr; }
  // It changes what the driver knows of memory: done even where the device's work is thrown away.
  virtual bool is_bookkeeping() const { return false; }
  bool may_run() const {
    for (const MarkRef& other : after)
      if (!other->done) return false;
    return ready();
  }
};
using OpRef = std::unique_ptr<Op>;
}  // namespace mock
