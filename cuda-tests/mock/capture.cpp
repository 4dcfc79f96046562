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

// CUDA: querying whether a stream is capturing has no side effects. For the legacy stream, the
// query fails while a blocking stream of the context is capturing:
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, which does not invalidate that capture.
bool is_implied(const Stream* stream) {
  if (stream != stream->device->legacy) return false;
  for (const Stream* other : machine().streams)
    if (other->device == stream->device && other->blocking && other->capture) return true;
  return false;
}

// CUDA (programming guide, prohibited and unhandled operations): the legacy stream encompasses the
// blocking streams of its context at all times. While one of them is being captured, any use of the
// legacy stream is invalid: querying it or waiting for it would query or wait for captured streams.
int implied_capture(const Stream* stream) {
  if (!is_implied(stream)) return OK;
  for (Stream* other : machine().streams)
    if (other->device == stream->device && other->blocking && other->capture) invalidate(other->capture);
  return CAPTURE_IMPLICIT;
}
}  // namespace mock

using namespace mock;

// CUDA: sets the calling thread's mode and returns the previous one.
API cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(INIT);
  if (!mode || *mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return OK;
}
