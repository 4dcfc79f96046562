// Captures from begin to end, graphs, which are their results, and replays.
//
// CUDA: a launch runs the nodes in any order that respects their dependencies, after the work that
// its stream holds. Kernel parameters are those of the capture; the contents of memory (a table, a
// pinned buffer) are read when the node runs. A launch also waits for earlier launches of the same
// executable graph, in any stream.
#include <algorithm>

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

// Returns true if every node leads to the origin stream's last nodes.
static bool joined(const Capture& capture) {
  std::vector<bool> reached(capture.nodes.size());
  std::vector<size_t> open;
  for (const Node* node : capture.origin->tail) open.push_back(node->index);
  while (!open.empty()) {
    size_t index = open.back();
    open.pop_back();
    if (reached[index]) continue;
    reached[index] = true;
    for (size_t before : capture.nodes[index]->after) open.push_back(before);
  }
  return std::find(reached.begin(), reached.end(), false) == reached.end();
}

static void end(Capture* capture) {
  capture->ended = true;
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->tail.clear();
  }
  std::vector<Capture*>& open = machine().captures;
  open.erase(std::remove(open.begin(), open.end(), capture), open.end());
}
}  // namespace mock

using namespace mock;

// CUDA: the legacy stream cannot be captured; a stream that is already capturing is in an illegal
// state.
API cuStreamBeginCapture_v2(void* raw, int mode) {
  ENTER(ALIVE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
  if (stream == stream->device->legacy) return CAPTURE_UNSUPPORTED;
  if (stream->capture) return ILLEGAL_STATE;
  // Never freed: events may keep pointers to it.
  Capture* capture = new Capture(stream, mode, ++machine().ids);
  stream->capture = capture;
  stream->tail.clear();
  machine().captures.push_back(capture);
  return OK;
}

// CUDA: a capture that is not relaxed must be ended by the thread that began it. An invalid capture
// ends with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED and a null graph.
API cuStreamEndCapture(void* raw, void** graph) {
  ENTER(ALIVE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  Capture* capture = stream->capture;
  if (!capture) return ILLEGAL_STATE;
  *graph = nullptr;
  if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  if (capture->origin != stream) return invalidate(capture), CAPTURE_UNMATCHED;
  bool whole = joined(*capture);
  end(capture);
  if (capture->invalid) return CAPTURE_INVALIDATED;
  if (!whole) return CAPTURE_UNJOINED;
  // The nodes stay, because events may point to them; the graph gets copies.
  auto nodes = std::make_shared<Nodes>();
  for (const auto& node : capture->nodes) nodes->push_back(std::make_unique<Node>(*node));
  *graph = adopt(new Graph(std::move(nodes)));
  return OK;
}

static int status_of(const Stream* stream) { return !stream->capture ? 0 : stream->capture->invalid ? 2 : 1; }


API cuStreamIsCapturing(void* raw, int* status) {
  ENTER(ALIVE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (is_implied(stream)) return CAPTURE_IMPLICIT;
  *status = status_of(stream);
  return OK;
}

static int info(void* raw, int* status, unsigned long long* id, const char* function) {
  ::mock::Call call(function, ALIVE);
  if (call.code) return call.code;
  Stream* stream = stream_of(raw, call, function);
  if (call.code) return call.code;
  if (is_implied(stream)) return CAPTURE_IMPLICIT;
  *status = status_of(stream);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  return OK;
}

API cuStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) { return info(stream, status, id, __func__); }

// The graph and its dependencies are not reported: a call that asks for them gets
// CUDA_ERROR_NOT_SUPPORTED rather than a wrong answer.
API cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void** before, size_t* count) {
  return graph || before || count ? int(NOT_SUPPORTED) : info(stream, status, id, __func__);
}
API cuStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, void** graph, const void** before, const void** edges,
                              size_t* count) {
  return graph || before || edges || count ? int(NOT_SUPPORTED) : info(stream, status, id, __func__);
}

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
