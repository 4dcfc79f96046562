// Graphs: what a capture has left, and its replays.
//
// CUDA: a launch runs the nodes in any order that keeps their dependencies, behind the work that its stream holds. Kernel
// parameters are those of the capture; what memory holds (a table, a pinned buffer) is read when the node runs. A launch
// also waits for earlier launches of the same executable graph, in whichever stream.
#include "graph.h"

namespace mock {
struct Replay : Op {
  std::shared_ptr<const Nodes> nodes;
  std::vector<OpRef> left;  // null where done
  size_t done = 0;

  const char* what() const override { return "graph"; }

  bool step(Device& device) override {
    if (left.empty())
      for (const auto& node : *nodes) left.push_back(node->op->again());
    std::vector<size_t> can;
    for (const auto& node : *nodes) {
      bool free = left[node->index] != nullptr;
      for (size_t before : node->after) free = free && !left[before];
      if (free) can.push_back(node->index);
    }
    if (!can.empty()) {
      OpRef& op = left[can[random_below(can.size())]];
      if (op->step(device)) op.reset(), done++;
    }
    return done == nodes->size();
  }
};
}  // namespace mock

using namespace mock;

API cuGraphInstantiateWithFlags(void** exec, void* raw, unsigned long long flags) {
  ENTER(ALIVE);
  Graph* graph = use<Graph>(raw, GRAPH, __func__);
  // CUDA: 1 auto free on launch, 2 upload, 4 device launch (excludes the first), 8 node priorities.
  if (!exec || flags > 15 || (flags & 5) == 5) return INVALID_VALUE;
  *exec = adopt(new Exec(graph->nodes));
  return OK;
}

API cuGraphLaunch(void* raw, void* raw_stream) {
  ENTER(ALIVE);
  Exec* exec = use<Exec>(raw, EXEC, __func__);
  Stream* stream = stream_of(raw_stream, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;  // a child graph: nobody here makes one
  auto replay = std::make_unique<Replay>();
  replay->nodes = exec->nodes;
  if (exec->last) replay->after.push_back(exec->last);
  exec->last = replay->mark;
  return enqueue(stream, std::move(replay));
}

// CUDA: moves what a launch needs to the device ahead of it; no other effect.
API cuGraphUpload(void* exec, void* raw_stream) {
  ENTER(ALIVE);
  use<Exec>(exec, EXEC, __func__);
  stream_of(raw_stream, call, __func__);
  return call.code;
}

API cuGraphGetNodes(void* raw, void** nodes, size_t* count) {
  ENTER(ALIVE);
  Graph* graph = use<Graph>(raw, GRAPH, __func__);
  if (nodes) return NOT_SUPPORTED;
  *count = graph->nodes->size();
  return OK;
}

API cuGraphDestroy(void* graph) {
  ENTER(INIT);
  destroy(use<Graph>(graph, GRAPH, __func__));
  return OK;
}

// CUDA: a launch in flight goes on to its end.
API cuGraphExecDestroy(void* exec) {
  ENTER(INIT);
  destroy(use<Exec>(exec, EXEC, __func__));
  return OK;
}
