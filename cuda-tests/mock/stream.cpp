// Streams: queues in which operations run in the order of their enqueueing.
#include <algorithm>

#include "state.h"

namespace mock {
Stream* new_stream(Device* device, int priority, bool blocking) {
  Stream* stream = new Stream(device, machine().ids++, priority, blocking);
  stream->rank = (1 << 10) + random_below(1 << 20);
  machine().streams.push_back(stream);
  return stream;
}

void forget_if_done(Stream* stream) {
  if (stream->alive || !stream->queue.empty()) return;
  std::vector<Stream*>& all = machine().streams;
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
}

// The legacy stream and the threads' own belong to the context: they are no handles of the program, and no leaks.
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
  // CUDA: the legacy stream is ordered with all streams of its context but the non-blocking ones: work in it comes after what those hold, and what they get later comes after it. While one of those
  // is capturing that order cannot be had: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
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

// CUDA: the lower the number, the greater the priority; recent devices have 0 to -5. A value outside is clamped.
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(ALIVE);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}

// CUDA flags: 0 blocking with regard to the legacy stream, 1 CU_STREAM_NON_BLOCKING.
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

// CUDA: a stream with work may be destroyed; the call does not wait, and what the stream holds is done all the same. Only
// the handle is gone; a failed context frees its handles all the same, with its error.
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
// A capturing stream cannot be waited for: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and its capture is invalid.
API cuStreamSynchronize(void* raw) {
  ENTER(ALIVE | UNSAFE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  MarkRef last = stream->last;  // what is enqueued from now on is not waited for
  return until(call, stream->device, stream, [&] { return !last || last->done; });
}

// CUDA: says CUDA_ERROR_NOT_READY where the stream has work left, without waiting.
API cuStreamQuery(void* raw) {
  ENTER(ALIVE | UNSAFE);
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
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

// CUDA: the context in which the stream was created; for the legacy and the per-thread handles, the current one.
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
