// Events: marks in streams.
//
// CUDA: an event represents the work that its stream held at the latest cuEventRecord. A wait
// enqueued by cuStreamWaitEvent is for the record that was the latest at that call; later records
// do not change it. Destroying an event or recording it again does not affect waits that are
// already enqueued.
#include "state.h"

namespace mock {
struct Record : Op {
  const char* what() const override { return "event record"; }
  bool step(Device&) override { return true; }
};

struct Wait : Op {
  const char* what() const override { return "event wait"; }
  bool step(Device&) override { return true; }
};

enum { BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 };

static int record(void* raw_event, void* raw_stream, Call& call, const char* function) {
  Event* event = use<Event>(raw_event, EVENT, function);
  Stream* stream = stream_of(raw_stream, call, function);
  if (call.code) return call.code;
  // CUDA: event and stream must be of the same context; else CUDA_ERROR_INVALID_HANDLE.
  if (event->device != stream->device) return INVALID_HANDLE;
  if (stream->capture) {
    record_captured(event, stream);
    return OK;
  }
  OpRef op = std::make_unique<Record>();
  MarkRef mark = op->mark;
  if (int code = enqueue(stream, std::move(op))) return code;
  event->record = mark;
  event->capture = nullptr;
  event->nodes.clear();
  return OK;
}
}  // namespace mock

using namespace mock;

API cuEventCreate(void** event, unsigned flags) {
  ENTER(ALIVE);
  // CUDA: an interprocess event must have timing disabled.
  if (!event || flags > 7 || ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING))) return INVALID_VALUE;
  *event = adopt(new Event(call.device, flags));
  return OK;
}

// CUDA: an incomplete event may be destroyed; the call does not wait, and the event's resources are
// freed when it completes.
API cuEventDestroy_v2(void* raw) {
  ENTER(INIT);
  Event* event = use<Event>(raw, EVENT, __func__);
  destroy(event);
  return event->device->failed;
}

API cuEventRecord(void* event, void* stream) {
  ENTER(ALIVE);
  return record(event, stream, call, __func__);
}

API cuEventRecordWithFlags(void* event, void* stream, unsigned flags) {
  ENTER(ALIVE);
  if (flags) return NOT_SUPPORTED;  // 1 is CU_EVENT_RECORD_EXTERNAL: not used here
  return record(event, stream, call, __func__);
}

// CUDA: an event that was never recorded counts as complete. CUDA_ERROR_CAPTURED_EVENT for an event
// whose record was captured; this also invalidates that capture: the query is not permitted in any
// mode.
API cuEventQuery(void* raw) {
  ENTER(INIT | UNSAFE);
  Event* event = use<Event>(raw, EVENT, __func__);
  if (event->device->failed) return event->device->failed;
  if (event->capture) return invalidate(event->capture), CAPTURED_EVENT;
  if (!event->record || event->record->done) return OK;
  // Work makes progress even while no thread waits in the driver. The lazy machine runs only what a
  // query needs.
  if (machine().style == Style::Lazy && !machine().paused) {
    step_one(event->record->stream);
    if (event->device->failed) return event->device->failed;
  }
  return event->record->done ? OK : NOT_READY;
}

API cuEventSynchronize(void* raw) {
  ENTER(INIT | UNSAFE);
  Event* event = use<Event>(raw, EVENT, __func__);
  if (event->device->failed) return event->device->failed;
  if (event->capture) return invalidate(event->capture), CAPTURED_EVENT;
  MarkRef record = event->record;
  if (!record) return OK;
  return until(call, event->device, record->stream, [&] { return record->done; });
}

// CUDA: the event may be from a different context; the host does not wait. Without a record, the
// call has no effect.
API cuStreamWaitEvent(void* raw_stream, void* raw_event, unsigned flags) {
  ENTER(ALIVE);
  if (flags > 1) return INVALID_VALUE;
  Event* event = use<Event>(raw_event, EVENT, __func__);
  Stream* stream = stream_of(raw_stream, call, __func__);
  if (call.code) return call.code;
  if (event->capture || stream->capture) return wait_captured(stream, event);
  if (!event->record) return OK;
  OpRef op = std::make_unique<Wait>();
  op->after.push_back(event->record);
  return enqueue(stream, std::move(op));
}

// CUDA: CUDA_ERROR_INVALID_HANDLE if either event was not recorded or was created with
// CU_EVENT_DISABLE_TIMING; CUDA_ERROR_NOT_READY if either is not complete. A step of the machine
// counts as one microsecond.
static int elapsed(float* milliseconds, void* raw_start, void* raw_end, const char* function) {
  ::mock::Call call(function, INIT);
  if (call.code) return call.code;
  Event* start = use<Event>(raw_start, EVENT, function);
  Event* end = use<Event>(raw_end, EVENT, function);
  if (start->device->failed) return start->device->failed;
  if (start->device != end->device || !start->record || !end->record) return INVALID_HANDLE;
  if ((start->flags | end->flags) & DISABLE_TIMING) return INVALID_HANDLE;
  if (!start->record->done || !end->record->done) return NOT_READY;
  *milliseconds = (float(end->record->tick) - float(start->record->tick)) / 1000.0f;
  return OK;
}

API cuEventElapsedTime(float* milliseconds, void* start, void* end) { return elapsed(milliseconds, start, end, __func__); }
API cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) { return elapsed(milliseconds, start, end, __func__); }
