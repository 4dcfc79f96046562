// Copies and fills.
//
// | copy | when the source is read |
// |---|---|
// | pinned host -> device | when the stream reaches the copy: the bytes that the buffer holds then are copied |
// | pageable host -> device | at the call, into a staging buffer of the driver |
// | device -> pinned host | when the stream reaches the copy; the call returns earlier |
// | device -> pageable host | the call returns when the copy is done |
//
// CUDA (API synchronization behavior): a copy to pageable memory returns when it is complete; one
// from pageable memory is staged first, and may return before the transfer. A copy is not atomic:
// it is done in pieces, and other operations may run between them.
#include <cstring>

#include "region.h"

namespace mock {
struct Copy : Op {
  uintptr_t to = 0, from = 0;
  size_t bytes = 0, at = 0;
  size_t width = 0, to_pitch = 0, from_pitch = 0;  // of rows; 0: one row
  bool to_host = false, from_host = false;
  std::shared_ptr<std::vector<char>> staged;     // instead of `from`
  bool pageable = false;                         // `to` is pageable: the caller waits in the driver
  Device *to_device = nullptr, *from_device = nullptr;  // set for peer copies only

  const char* what() const override { return "copy"; }

  std::unique_ptr<Op> again() const override {
    auto copy = std::make_unique<Copy>();
    copy->to = to, copy->from = from, copy->bytes = bytes, copy->to_host = to_host, copy->from_host = from_host;
    copy->to_device = to_device, copy->from_device = from_device;
    copy->width = width, copy->to_pitch = to_pitch, copy->from_pitch = from_pitch;
    return copy;
  }

  // Bytes from the first one of the first row to the last one of the last row.
  size_t span(size_t pitch) const { return width ? (bytes / width - 1) * pitch + width : bytes; }

  // A copy to or from a failed device ends in an error, or never: see `spread_failure`.
  bool needs_failed() const override { return (to_device && to_device->failed) || (from_device && from_device->failed); }
  bool ready() const override { return !(machine().rules.hang && needs_failed()); }

  void check(const Device& device) const {
    if (needs_failed()) throw Fault{to_device->failed ? to_device->failed : from_device->failed};
    size_t to_bytes = span(to_pitch), from_bytes = span(from_pitch);
    if (to_host ? !pageable && !pinned(to, to_bytes) : false) die("the pinned buffer %p was freed before a copy wrote to it", (void*)to);
    if (from_host && !staged && !pinned(from, from_bytes)) die("the pinned buffer %p was freed before a copy read it", (void*)from);
    if (to_host && !pageable) check_pages(to, to_bytes);
    if (from_host && !staged) check_pages(from, from_bytes);
    if (!to_host && !may_touch(to_device ? *to_device : device, to, to_bytes, true)) throw Fault{ILLEGAL_ADDRESS};
    if (!from_host && !may_touch(from_device ? *from_device : device, from, from_bytes, false)) throw Fault{ILLEGAL_ADDRESS};
  }

  bool step(Device& device) override {
    check(device);
    size_t most = bytes / 3 + 4096, left = bytes - at, now = 1 + random_below(most);
    if (now > left) now = left;
    const char* source = staged ? staged->data() : reinterpret_cast<const char*>(from);
    char* target = reinterpret_cast<char*>(to);
    for (size_t row = width ? width : bytes; now;) {
      size_t inside = at % row, part = row - inside < now ? row - inside : now;
      memcpy(target + at / row * to_pitch + inside, source + at / row * from_pitch + inside, part);
      at += part, now -= part;
    }
    return at == bytes;
  }
};

struct Fill : Op {
  uintptr_t to = 0;
  size_t count = 0;
  unsigned value = 0, width = 1;

  const char* what() const override { return "fill"; }
  std::unique_ptr<Op> again() const override {
    auto fill = std::make_unique<Fill>();
    fill->to = to, fill->count = count, fill->value = value, fill->width = width;
    return fill;
  }
  bool step(Device& device) override {
    if (!may_touch(device, to, count * width, true)) throw Fault{ILLEGAL_ADDRESS};
    if (width == 1) memset(reinterpret_cast<char*>(to), int(value & 0xFF), count);
    else for (size_t i = 0; i < count; i++) memcpy(reinterpret_cast<char*>(to) + i * width, &value, width);
    return true;
  }
};

static uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

static int to_device(uintptr_t to, const void* from, size_t bytes, Stream* stream) {
  if (!bytes) return OK;
  if (!region_at(to) || torn(address(from), bytes)) return INVALID_VALUE;
  auto copy = std::make_unique<Copy>();
  copy->to = to, copy->from = address(from), copy->bytes = bytes, copy->from_host = true;
  if (!pinned(address(from), bytes)) {
    // Pageable memory in a capture: CUDA does not specify which bytes a replay copies. Refused.
    if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
    const char* data = static_cast<const char*>(from);
    copy->staged = std::make_shared<std::vector<char>>(data, data + bytes);
  }
  return enqueue(stream, std::move(copy));
}

static int to_host(Call& call, void* to, uintptr_t from, size_t bytes, Stream* stream, bool wait) {
  if (!bytes) return OK;
  if (!region_at(from) || torn(address(to), bytes)) return INVALID_VALUE;
  auto copy = std::make_unique<Copy>();
  copy->to = address(to), copy->from = from, copy->bytes = bytes, copy->to_host = true;
  copy->pageable = !pinned(address(to), bytes);
  if (copy->pageable && stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  wait |= copy->pageable;
  MarkRef mark = copy->mark;
  if (int code = enqueue(stream, std::move(copy))) return code;
  return wait ? until(call, stream->device, stream, [&] { return mark->done; }) : int(OK);
}

static int between(uintptr_t to, uintptr_t from, size_t bytes, Stream* stream, Device* to_device, Device* from_device) {
  if (!bytes) return OK;
  if (!region_at(to) || !region_at(from)) return INVALID_VALUE;
  if (to < from + bytes && from < to + bytes) die("a copy of %zu bytes from %p onto itself at %p: undefined", bytes, (void*)from, (void*)to);
  auto copy = std::make_unique<Copy>();
  copy->to = to, copy->from = from, copy->bytes = bytes, copy->to_device = to_device, copy->from_device = from_device;
  return enqueue(stream, std::move(copy));
}

static int fill(uintptr_t to, unsigned value, unsigned width, size_t count, Stream* stream) {
  if (!count) return OK;
  if (!region_at(to) || to % width) return INVALID_VALUE;
  auto op = std::make_unique<Fill>();
  op->to = to, op->value = value, op->width = width, op->count = count;
  return enqueue(stream, std::move(op));
}
}  // namespace mock

using namespace mock;

#define STREAM_OR_RETURN(raw)                     \
  Stream* stream = stream_of(raw, call, __func__); \
  if (call.code) return call.code

API cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  return to_device(to, from, bytes, stream);
}

// CUDA: the synchronous copy returns when a copy from pinned memory is done; from pageable memory,
// when it is staged.
API cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  ENTER(ALIVE | UNSAFE);
  STREAM_OR_RETURN(nullptr);
  if (int code = to_device(to, from, bytes, stream)) return code;
  MarkRef last = stream->last;
  if (!pinned(address(from), bytes)) return OK;
  return until(call, stream->device, stream, [&] { return !last || last->done; });
}

API cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  return to_host(call, to, from, bytes, stream, false);
}

API cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
  ENTER(ALIVE | UNSAFE);
  STREAM_OR_RETURN(nullptr);
  return to_host(call, to, from, bytes, stream, true);
}

API cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  return between(to, from, bytes, stream, nullptr, nullptr);
}

// CUDA: the host does not wait for a copy within device memory, although the call is the
// synchronous one.
API cuMemcpyDtoD_v2(uintptr_t to, uintptr_t from, size_t bytes) {
  ENTER(ALIVE | UNSAFE);
  STREAM_OR_RETURN(nullptr);
  return between(to, from, bytes, stream, nullptr, nullptr);
}

// CUDA: each side is accessed through its own context, so no peer access is needed.
API cuMemcpyPeerAsync(uintptr_t to, void* to_context, uintptr_t from, void* from_context, size_t bytes, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  Device *to_device = static_cast<Device*>(to_context), *from_device = static_cast<Device*>(from_context);
  if (!to_device || !from_device || !to_device->retained || !from_device->retained) return INVALID_CONTEXT;
  if (to_device->failed) return to_device->failed;
  if (from_device->failed) return from_device->failed;
  return between(to, from, bytes, stream, to_device, from_device);
}

// CUDA: each pitch is at least the width, and at most CU_DEVICE_ATTRIBUTE_MAX_PITCH, which is 2^31 - 1
// on every device so far. The mock has host and device memory, and no arrays; and it copies rows only
// from and to pinned memory.
struct Rectangle {
  size_t from_x, from_y;
  unsigned from_kind;
  const void* from_host;
  uintptr_t from_device;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  unsigned to_kind;
  void* to_host;
  uintptr_t to_device;
  void* to_array;
  size_t to_pitch, width, height;
};

API cuMemcpy2DAsync_v2(const Rectangle* of, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  constexpr unsigned HOST = 1, DEVICE = 2;
  constexpr size_t PITCH_MAX = (size_t(1) << 31) - 1;
  if (!of) return INVALID_VALUE;
  if (!of->width || !of->height) return OK;
  for (size_t pitch : {of->from_pitch, of->to_pitch})
    if (pitch < of->width || pitch > PITCH_MAX) return INVALID_VALUE;
  bool to_host = of->to_kind == HOST, from_host = of->from_kind == HOST;
  if ((!to_host && of->to_kind != DEVICE) || (!from_host && of->from_kind != DEVICE) || to_host == from_host) return NOT_SUPPORTED;
  auto copy = std::make_unique<Copy>();
  copy->to = (to_host ? address(of->to_host) : of->to_device) + of->to_y * of->to_pitch + of->to_x;
  copy->from = (from_host ? address(of->from_host) : of->from_device) + of->from_y * of->from_pitch + of->from_x;
  copy->bytes = of->width * of->height, copy->width = of->width;
  copy->to_pitch = of->to_pitch, copy->from_pitch = of->from_pitch;
  copy->to_host = to_host, copy->from_host = from_host;
  uintptr_t host = to_host ? copy->to : copy->from;
  if (!region_at(to_host ? copy->from : copy->to)) return INVALID_VALUE;
  size_t span = copy->span(to_host ? copy->to_pitch : copy->from_pitch);
  if (torn(host, span)) return INVALID_VALUE;
  if (!pinned(host, span)) return NOT_SUPPORTED;
  return enqueue(stream, std::move(copy));
}

// CUDA: copies of one batch have no order among each other; the call fails without effect if it refuses
// any of them. Copies within a device's memory only; the mock performs them in any order.
API cuMemcpyBatchAsync(uintptr_t* to, uintptr_t* from, size_t* bytes, size_t count, void* attributes, size_t* attribute_of, size_t attribute_count, size_t* failed, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  if (reinterpret_cast<uintptr_t>(raw) <= 2) return INVALID_HANDLE;  // CUDA: not the default streams
  if (!to || !from || !bytes || !count || !attributes || !attribute_of || !attribute_count || attribute_of[0]) return INVALID_VALUE;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  for (size_t i = 0; i < count; i++)
    if (!bytes[i] || !region_at(to[i]) || !region_at(from[i])) {
      if (failed) *failed = i;
      return INVALID_VALUE;
    }
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; i++) order[i] = i;
  for (size_t i = count; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  for (size_t i : order)
    if (int code = between(to[i], from[i], bytes[i], stream, nullptr, nullptr)) return code;
  return OK;
}

// CUDA: infers the kind of copy from the pointers.
API cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  auto on_device = [](uintptr_t at) { const Region* region = region_at(at); return region && (region->kind == DEVICE_MEMORY || region->kind == RESERVATION); };
  if (on_device(to) && on_device(from)) return between(to, from, bytes, stream, nullptr, nullptr);
  if (on_device(to)) return to_device(to, reinterpret_cast<void*>(from), bytes, stream);
  if (on_device(from)) return to_host(call, reinterpret_cast<void*>(to), from, bytes, stream, false);
  return NOT_SUPPORTED;
}

API cuMemsetD8Async(uintptr_t to, unsigned char value, size_t count, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  return fill(to, value, 1, count, stream);
}

API cuMemsetD32Async(uintptr_t to, unsigned value, size_t count, void* raw) {
  ENTER(ALIVE);
  STREAM_OR_RETURN(raw);
  return fill(to, value, 4, count, stream);
}

// CUDA: a memset of device memory without a stream does not wait either; it runs in the legacy
// stream.
API cuMemsetD8_v2(uintptr_t to, unsigned char value, size_t count) {
  ENTER(ALIVE | UNSAFE);
  STREAM_OR_RETURN(nullptr);
  return fill(to, value, 1, count, stream);
}
