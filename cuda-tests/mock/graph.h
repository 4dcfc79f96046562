// Captures and graphs: operations with their dependencies, to be run later, any number of times.
//
//   begin capture --> Capture (nodes grow; streams join it by events) --end--> Graph --instantiate--> Exec --launch--> Replay
#pragma once
#include <thread>

#include "state.h"

namespace mock {
enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Node {
  std::shared_ptr<const Op> op;  // the pattern; `again` makes the operation that runs
  std::vector<size_t> after;     // indices of the nodes that must be done before
  size_t index;
};
using Nodes = std::vector<std::unique_ptr<Node>>;

struct Capture {
  Stream* origin;
  int mode;
  std::thread::id thread;
  uint64_t id;
  bool invalid = false, ended = false;
  Nodes nodes;
  std::vector<Stream*> streams;
  Capture(Stream* origin, int mode, uint64_t id) : origin(origin), mode(mode), thread(std::this_thread::get_id()), id(id), streams{origin} {}
};

struct Graph : Handle {
  std::shared_ptr<const Nodes> nodes;
  explicit Graph(std::shared_ptr<const Nodes> nodes) : Handle(GRAPH), nodes(std::move(nodes)) {}
};

struct Exec : Handle {
  std::shared_ptr<const Nodes> nodes;
  MarkRef last;  // of its latest launch
  explicit Exec(std::shared_ptr<const Nodes> nodes) : Handle(EXEC), nodes(std::move(nodes)) {}
};
}  // namespace mock
