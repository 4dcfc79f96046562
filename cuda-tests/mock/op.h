// Operations in a stream's queue: pieces of device work, done in steps, so that other streams run
// in between.
//
//   Mark   done or not: shared by the operation, the events recorded after it, and waiting threads
//   Op     copy, fill, launch, host function, allocation, graph: `step` does a part of the work and
//          returns true when all is done
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
  uint64_t tick = 0;         // time of completion, in steps of the machine
  Stream* stream = nullptr;  // owner of the queue; never freed, so this stays valid
};
using MarkRef = std::shared_ptr<Mark>;

struct Fault { int code; };

struct Op {
  uint64_t seq = 0;            // position in the order of enqueueing, over all streams
  MarkRef mark = std::make_shared<Mark>();
  std::vector<MarkRef> after;  // must be done before the first step
  bool has_begun = false;      // a step of it has run
  virtual ~Op() = default;
  virtual const char* what() const = 0;
  virtual bool ready() const { return true; }
  // True if the operation accesses the memory of another device that has failed.
  virtual bool needs_failed() const { return false; }
  virtual bool step(Device& device) = 0;
  // Returns a copy for a replay; null if this kind cannot be captured.
  virtual std::unique_ptr<Op> again() const { return nullptr; }
  // True if the operation changes the driver's records of memory: it is done even if the device's
  // work is discarded.
  virtual bool is_bookkeeping() const { return false; }
  bool may_run() const {
    for (const MarkRef& other : after)
      if (!other->done) return false;
    return ready();
  }
};
using OpRef = std::unique_ptr<Op>;
}  // namespace mock
