// Graphs: the results of captures, and their replays.
//
// CUDA: a launch runs the nodes in any order that respects their dependencies, after the work that
// its stream holds. Kernel parameters are those of the capture; the contents of memory (a table, a
// pinned buffer) are read when the node runs. A launch also waits for earlier launches of the same
// executable graph, in any stream.
#include "graph.h"

namespace mock {
struct Replay : Op {
  std::shared_ptr<const Nodes> nodes;
  std::vector<OpRef> left;  // null once done
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
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;  // a child graph: not used here
  auto replay = std::make_unique<Replay>();
  replay->nodes = exec->nodes;
  if (exec->last) replay->after.push_back(exec->last);
  exec->last = replay->mark;
  return enqueue(stream, std::move(replay));
}

// CUDA: uploads the resources of a launch to the device in advance; no other effect.
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

// CUDA: a launch in flight still runs to its end.
API cuGraphExecDestroy(void* exec) {
  ENTER(INIT);
  destroy(use<Exec>(exec, EXEC, __func__));
  return OK;
}
