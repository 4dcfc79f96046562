// Stream capture, and the calls that invalidate captures.
//
// CUDA (cuThreadExchangeStreamCaptureMode): a *potentially unsafe* call, one that may wait for the
// device or allocate, is forbidden depending on the calling thread's own mode:
//
// | thread's mode | forbidden while |
// |---|---|
// | global (initial mode of every thread) | this thread has begun a capture that is not relaxed, or any thread has begun a global one |
// | thread-local | this thread has begun a capture that is not relaxed |
// | relaxed | never |
//
// A forbidden call fails with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and invalidates every capture
// that forbids it. CUDA documents no full list of unsafe calls. Here: every wait, every query, and
// every call that allocates, frees, maps or loads.
#include <algorithm>

#include "graph.h"

namespace mock {
static thread_local int thread_mode = GLOBAL;

void invalidate(Capture* capture) {
  if (capture && !capture->ended) capture->invalid = true;
}

int unsafe_call() {
  if (thread_mode == RELAXED) return OK;
  int code = OK;
  for (Capture* capture : machine().captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != RELAXED;
    bool others = thread_mode == GLOBAL && capture->mode == GLOBAL;
    if (!own && !others) continue;
    invalidate(capture);
    code = CAPTURE_UNSUPPORTED;
  }
  return code;
}

// CUDA: work submitted to a capturing stream is not enqueued; it becomes a node that depends on the
// stream's latest nodes.
int captured(Stream* stream, OpRef op) {
  Capture* capture = stream->capture;
  if (capture->invalid) return CAPTURE_INVALIDATED;
  // Host functions would become host nodes. No code here may rely on one in a replay, so they are
  // refused.
  if (!op->again()) return invalidate(capture), CAPTURE_UNSUPPORTED;
  auto node = std::make_unique<Node>();
  node->op = std::move(op);
  node->index = capture->nodes.size();
  for (const Node* before : stream->tail) node->after.push_back(before->index);
  stream->tail = {node.get()};
  capture->nodes.push_back(std::move(node));
  return OK;
}

void record_captured(Event* event, Stream* stream) {
  event->record = nullptr;
  event->capture = stream->capture;
  event->nodes = stream->tail;
}

// CUDA: a wait for a captured event adds the waiting stream to the capture; two captures cannot be
// merged; a capture cannot depend on work outside it.
int wait_captured(Stream* stream, Event* event) {
  Capture* from = event->capture;
  if (from && from->ended) return CAPTURED_EVENT;
  if (!from) {
    if (!event->record) return OK;
    return invalidate(stream->capture), CAPTURE_ISOLATION;
  }
  if (from->invalid) return CAPTURE_INVALIDATED;
  if (stream->capture && stream->capture != from) return invalidate(from), invalidate(stream->capture), CAPTURE_MERGE;
  if (stream == stream->device->legacy) return invalidate(from), CAPTURE_IMPLICIT;
  if (!stream->capture) {
    stream->capture = from;
    stream->tail.clear();
    from->streams.push_back(stream);
  }
  for (Node* node : event->nodes)
    if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) stream->tail.push_back(node);
  return OK;
}

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

// CUDA: querying whether a stream is capturing has no side effects. For the legacy stream, the
// query fails while a blocking stream of the context is capturing:
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, which does not invalidate that capture.
static bool is_implied(const Stream* stream) {
  if (stream != stream->device->legacy) return false;
  for (const Stream* other : machine().streams)
    if (other->device == stream->device && other->blocking && other->capture) return true;
  return false;
}

// CUDA (programming guide, prohibited and unhandled operations): the legacy stream encompasses the
// blocking streams of its context at all times. While one of them is being captured, any use of the
// legacy stream is invalid: querying it or waiting for it would query or wait for captured streams.
namespace mock {
int implied_capture(const Stream* stream) {
  if (!is_implied(stream)) return OK;
  for (Stream* other : machine().streams)
    if (other->device == stream->device && other->blocking && other->capture) invalidate(other->capture);
  return CAPTURE_IMPLICIT;
}
}  // namespace mock

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

// CUDA: sets the calling thread's mode and returns the previous one.
API cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(INIT);
  if (!mode || *mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return OK;
}
