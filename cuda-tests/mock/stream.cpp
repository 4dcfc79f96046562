// Streams: queues whose operations run in the order of enqueueing.
#include <algorithm>

#include "state.h"

namespace mock {
Stream* new_stream(Device* device, int priority, bool blocking) {
  Stream* stream = new Stream(device, machine().ids++, priority, blocking);
  stream->rank = (1 << 10) + random_below(1 << 20);
  stream->lane = unsigned(machine().streams.size());
  machine().streams.push_back(stream);
  return stream;
}

void forget_if_done(Stream* stream) {
  if (stream->alive || !stream->queue.empty()) return;
  std::vector<Stream*>& all = machine().streams;
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
}

// The legacy stream and the per-thread streams belong to the context: they are not handles of the
// program, and do not count as leaks.
static Stream* implicit_stream(Device* device, bool of_thread) {
  if (!of_thread) {
    if (!device->legacy) {
      device->legacy = new_stream(device, 0, true);
      machine().handles.emplace(device->legacy, std::unique_ptr<Handle>(device->legacy));
    }
    return device->legacy;
  }
  static thread_local std::map<Device*, Stream*> own;
  Stream*& stream = own[device];
  if (!stream) {
    stream = new_stream(device, 0, true);
    machine().handles.emplace(stream, std::unique_ptr<Handle>(stream));
  }
  return stream;
}

Stream* stream_of(void* raw, Call& call, const char* function) {
  uintptr_t value = reinterpret_cast<uintptr_t>(raw);
  Stream* stream = value <= 2 ? implicit_stream(call.device, value == 2) : use<Stream>(raw, STREAM, function);
  if (stream->device->failed) call.code = stream->device->failed;
  return stream;
}

int enqueue(Stream* stream, OpRef op) {
  Machine& m = machine();
  if (stream->capture) return captured(stream, std::move(op));
  Device* device = stream->device;
  // CUDA: queues are bounded, and a call that finds its stream's full blocks. The device makes
  // progress meanwhile, also while a test has paused it.
  if (stream->queue.size() >= m.rules.queue_limit && calling) {
    size_t limit = m.rules.queue_limit;
    if (int failed = drive(*calling, device, stream, [stream, limit] { return stream->queue.size() < limit; })) return failed;
  }
  // CUDA: the legacy stream is ordered with all streams of its context except non-blocking ones:
  // its work runs after the work that they hold, and their later work runs after it. While one of
  // them is capturing, this order is impossible: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
  for (Stream* other : m.streams) {
    if (other->device != device || !other->blocking || other == stream) continue;
    if (stream == device->legacy && other->capture) {
      invalidate(other->capture);
      return CAPTURE_IMPLICIT;
    }
    bool ordered = stream == device->legacy || (stream->blocking && other == device->legacy);
    if (ordered && other->last && !other->last->done) op->after.push_back(other->last);
  }
  op->seq = m.enqueued++;
  op->mark->stream = stream;
  stream->last = op->mark;
  stream->queue.push_back(std::move(op));
  m.changed.notify_all();
  return OK;
}
}  // namespace mock

using namespace mock;

// CUDA: lower numbers are higher priorities; recent devices have 0 to -5. Values outside the range
// are clamped.
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(ALIVE);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}

// CUDA flags: 0 blocking with respect to the legacy stream, 1 CU_STREAM_NON_BLOCKING.
API cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  ENTER(ALIVE);
  if (!stream || flags > 1) return INVALID_VALUE;
  *stream = adopt(new_stream(call.device, priority > 0 ? 0 : priority < -5 ? -5 : priority, flags == 0));
  return OK;
}

API cuStreamCreate(void** stream, unsigned flags) {
  ENTER(ALIVE);
  if (!stream || flags > 1) return INVALID_VALUE;
  *stream = adopt(new_stream(call.device, 0, flags == 0));
  return OK;
}

// CUDA: a stream with work may be destroyed; the call does not wait, and the stream's work still
// runs. Only the handle is destroyed. A failed context frees its handles too, and returns its
// error.
API cuStreamDestroy_v2(void* raw) {
  ENTER(INIT);
  if (reinterpret_cast<uintptr_t>(raw) <= 2) return INVALID_HANDLE;
  Stream* stream = use<Stream>(raw, STREAM, __func__);
  if (stream->capture) invalidate(stream->capture);
  destroy(stream);
  forget_if_done(stream);
  return stream->device->failed;
}

// CUDA: waits for all operations of the stream; reports errors of earlier asynchronous work.
// Waiting for a capturing stream is CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and invalidates its
// capture.
API cuStreamSynchronize(void* raw) {
  ENTER(ALIVE | UNSAFE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  if (int code = implied_capture(stream)) return code;
  MarkRef last = stream->last;  // excludes work that is enqueued from now on
  return until(call, stream->device, stream, [&] { return !last || last->done; });
}

// CUDA: returns CUDA_ERROR_NOT_READY if the stream has work left, without waiting.
API cuStreamQuery(void* raw) {
  ENTER(ALIVE | UNSAFE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  if (int code = implied_capture(stream)) return code;
  if (stream->queue.empty()) return OK;
  if (machine().style == Style::Lazy && !machine().paused) step_one(stream);
  return NOT_READY;
}

API cuStreamGetPriority(void* raw, int* priority) {
  ENTER(CONTEXT);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  *priority = stream->priority;
  return OK;
}

API cuStreamGetFlags(void* raw, unsigned* flags) {
  ENTER(CONTEXT);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  *flags = stream->blocking ? 0 : 1;
  return OK;
}

API cuStreamGetId(void* raw, unsigned long long* id) {
  ENTER(CONTEXT);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  *id = stream->id;
  return OK;
}

// CUDA: returns the context in which the stream was created; for the legacy and the per-thread
// handles, the current one.
API cuStreamGetCtx(void* raw, void** context) {
  ENTER(CONTEXT);
  *context = stream_of(raw, call, __func__)->device;
  return call.code;
}

API cuStreamGetDevice(void* raw, int* device) {
  ENTER(CONTEXT);
  *device = stream_of(raw, call, __func__)->device->ordinal;
  return call.code;
}
