// Allocation of device memory and of pinned host memory.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "region.h"

namespace mock {
std::map<uintptr_t, Region>& regions() {
  static auto* all = new std::map<uintptr_t, Region>;
  return *all;
}

Region* region_at(uintptr_t at) {
  auto after = regions().upper_bound(at);
  if (after == regions().begin()) return nullptr;
  Region& region = std::prev(after)->second;
  return at - region.base < region.size ? &region : nullptr;
}

bool pinned(uintptr_t at, size_t bytes) {
  const Region* region = region_at(at);
  return region && (region->kind == HOST_MEMORY || region->kind == REGISTERED) && region->holds(at, bytes);
}

// CUDA (cuMemHostRegister, cuMemcpyAsync): the host's bytes of a copy are of one allocation or
// registration, or of none; otherwise the copy is refused as CUDA_ERROR_INVALID_VALUE.
bool torn(uintptr_t at, size_t bytes) {
  if (!bytes || pinned(at, bytes)) return false;
  const Region *first = region_at(at), *last = region_at(at + bytes - 1);
  auto is_locked = [](const Region* region) { return region && (region->kind == HOST_MEMORY || region->kind == REGISTERED); };
  return is_locked(first) || is_locked(last);
}

// The driver holds the physical pages of registered memory. If the program returns them to the system
// (madvise), it gets others at the same addresses, and the device goes on to access the old ones.
void check_pages(uintptr_t at, size_t bytes) {
  const Region* region = region_at(at);
  if (!region || region->kind != REGISTERED) return;
  uintptr_t first = at / PAGE * PAGE;
  std::vector<unsigned char> resident((at + bytes - first + PAGE - 1) / PAGE);
  if (mincore(reinterpret_cast<void*>(first), at + bytes - first, resident.data())) die("registered memory at %p was unmapped", (void*)at);
  for (unsigned char page : resident)
    if (!(page & 1)) die("pages of registered memory at %p were returned to the system", (void*)at);
}

// CUDA, unified addressing: every device can access pinned host memory at its host address; another
// device's memory only after cuCtxEnablePeerAccess (memory of cuMemCreate: only by cuMemSetAccess).
bool may_touch(const Device& device, uintptr_t at, size_t bytes, bool write) {
  if (!bytes) return true;
  const Region* region = region_at(at);
  if (!region || !region->holds(at, bytes)) return false;
  if (region->kind == HOST_MEMORY || region->kind == REGISTERED) return true;
  if (region->kind == DEVICE_MEMORY)
    return !region->coming && (region->device == &device || device.peers.count(region->device->ordinal));
  for (uintptr_t next = at, end = at + bytes; next < end;) {
    auto after = mappings().upper_bound(next);
    if (after == mappings().begin()) return false;
    const auto& [base, mapping] = *std::prev(after);
    if (next - base >= mapping.bytes) return false;
    auto access = mapping.access.find(&device);
    if (access == mapping.access.end() || !(access->second & (write ? 2 : 1))) return false;
    next = base + mapping.bytes;
  }
  return true;
}

bool take(Device& device, size_t bytes) {
  if (bytes > device.capacity || device.used > device.capacity - bytes) return false;
  device.used += bytes;
  return true;
}

void give(Device& device, size_t bytes) { device.used -= bytes; }

static size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// CUDA takes physical memory in slabs of 2 MiB. Small allocations share slabs, in units of 512
// bytes, so that an allocation may change the free memory by a whole slab, or not at all. A slab is
// returned when the small allocations fit into one less.
static bool charge(Device& device, size_t bytes) {
  if (bytes >= SLAB / 2) return take(device, up(bytes, SLAB));
  size_t small = device.small + up(bytes, ALIGNMENT);
  if (!take(device, up(small, SLAB) - up(device.small, SLAB))) return false;
  device.small = small;
  return true;
}

static void refund(Device& device, size_t bytes) {
  if (bytes >= SLAB / 2) return give(device, up(bytes, SLAB));
  size_t small = device.small - up(bytes, ALIGNMENT);
  give(device, up(device.small, SLAB) - up(small, SLAB));
  device.small = small;
}

static Region place(Kind kind, Device* device, size_t bytes, int access) {
  Region region;
  region.kind = kind;
  region.device = device;
  region.size = bytes;
  region.id = ++machine().ids;
  size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, pages = (rounded + PAGE - 1) / PAGE * PAGE;
  region.area_bytes = pages + 2 * PAGE;
  region.area = mmap(nullptr, region.area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region.area == MAP_FAILED) return region;
  char* inside = static_cast<char*>(region.area) + PAGE;
  if (access != PROT_NONE && mprotect(inside, pages, access)) die("no memory for %zu bytes", bytes);
  // At the end of the pages: the guard follows the last byte, rounded up to the alignment.
  region.base = reinterpret_cast<uintptr_t>(inside + pages - rounded);
  return region;
}

static void fill_fresh(const Region& region) {
  size_t slack = (region.size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - region.size;
  char* base = reinterpret_cast<char*>(region.base);
  // CUDA: fresh memory is not cleared.
  if (region.size <= (size_t(64) << 20)) memset(base, POISON, region.size);
  memset(base + region.size, CANARY, slack);
}

static void close(Region& region, const char* function) {
  const unsigned char* end = reinterpret_cast<unsigned char*>(region.base + region.size);
  size_t slack = (region.size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - region.size;
  for (size_t i = 0; !region.coming && i < slack; i++)
    if (end[i] != CANARY) die("%s: %zu bytes were written past the end of the %zu bytes at %p", function, i + 1, region.size, (void*)region.base);
  // The address range stays reserved and inaccessible: a late access faults.
  mmap(region.area, region.area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  machine().live[region.kind]--;
  regions().erase(region.base);
}

static Region* owned(uintptr_t at, Kind kind, const char* function) {
  auto found = regions().find(at);
  if (found == regions().end() || found->second.kind != kind || found->second.going)
    die("%s: %p was not allocated here, or was freed before", function, (void*)at);
  return &found->second;
}

struct Arrive : Op {
  uintptr_t at;
  const char* what() const override { return "allocation"; }
  bool is_bookkeeping() const override { return true; }
  bool step(Device&) override {
    auto found = regions().find(at);
    if (found == regions().end()) return true;  // freed while the device was lost
    Region& region = found->second;
    mprotect(static_cast<char*>(region.area) + PAGE, region.area_bytes - 2 * PAGE, PROT_READ | PROT_WRITE);
    region.coming = false;
    fill_fresh(region);
    return true;
  }
};

struct Leave : Op {
  uintptr_t at;
  const char* what() const override { return "free"; }
  bool is_bookkeeping() const override { return true; }
  bool step(Device&) override {
    Region& region = regions().at(at);
    refund(*region.device, region.size);
    close(region, "cuMemFreeAsync");
    return true;
  }
};
}  // namespace mock

using namespace mock;

// CUDA: aligned for every type (512 bytes) and not cleared; a size of 0
// is CUDA_ERROR_INVALID_VALUE.
API cuMemAlloc_v2(uintptr_t* at, size_t bytes) {
  ENTER(ALIVE | UNSAFE);
  stall(call, call.device);
  if (!at || !bytes) return INVALID_VALUE;
  if (!charge(*call.device, bytes)) return OUT_OF_MEMORY;
  Region region = place(DEVICE_MEMORY, call.device, bytes, PROT_READ | PROT_WRITE);
  if (region.area == MAP_FAILED) return refund(*call.device, bytes), OUT_OF_MEMORY;
  fill_fresh(region);
  regions()[*at = region.base] = region;
  machine().live[DEVICE_MEMORY]++;
  return OK;
}

// The driver waits for the work of the context before it frees memory (implicit synchronization of
// the programming guide). On a failed context it does not wait, and returns the context's error
// although the memory is freed.
API cuMemFree_v2(uintptr_t at) {
  ENTER(CONTEXT | UNSAFE);
  if (!at) return OK;
  Device* device = owned(at, DEVICE_MEMORY, __func__)->device;
  int result = until_all_done(call, device);
  Region* region = owned(at, DEVICE_MEMORY, __func__);
  refund(*device, region->size);
  close(*region, __func__);
  return result;
}

// CUDA: the memory may be accessed once the stream has reached the allocation. Until then the
// address is inaccessible: a kernel of another stream that does not wait faults.
API cuMemAllocAsync(uintptr_t* at, size_t bytes, void* raw) {
  ENTER(ALIVE);
  if (!at || !bytes) return INVALID_VALUE;
  Stream* stream = stream_of(raw, call, __func__);
  if (call.code) return call.code;
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;  // a memory node: not used here
  if (!charge(*stream->device, bytes)) return OUT_OF_MEMORY;
  Region region = place(DEVICE_MEMORY, stream->device, bytes, PROT_NONE);
  if (region.area == MAP_FAILED) return refund(*stream->device, bytes), OUT_OF_MEMORY;
  region.coming = true;
  regions()[*at = region.base] = region;
  machine().live[DEVICE_MEMORY]++;
  auto op = std::make_unique<Arrive>();
  op->at = region.base;
  return enqueue(stream, std::move(op));
}

// CUDA: the memory is freed in stream order. Earlier work of the same stream may access it; work of
// other streams only if it is ordered before.
API cuMemFreeAsync(uintptr_t at, void* raw) {
  ENTER(CONTEXT);
  Region* region = owned(at, DEVICE_MEMORY, __func__);
  Stream* stream = stream_of(raw, call, __func__);
  if (stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  if (call.code) {  // a failed context: its streams make no more progress
    refund(*region->device, region->size);
    close(*region, __func__);
    return call.code;
  }
  region->going = true;
  auto op = std::make_unique<Leave>();
  op->at = at;
  return enqueue(stream, std::move(op));
}

API cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER(ALIVE);
  *free = call.device->capacity > call.device->used ? call.device->capacity - call.device->used : 0;
  *total = call.device->capacity;
  return OK;
}

// CUDA flags: 1 portable, 2 device-mapped, 4 write-combined. Pinned memory is host memory that
// copies access when they run, not when they are enqueued.
API cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
  ENTER(ALIVE | UNSAFE);
  stall_all(call);
  if (!at || !bytes || flags > 7) return INVALID_VALUE;
  Region region = place(HOST_MEMORY, call.device, bytes, PROT_READ | PROT_WRITE);
  if (region.area == MAP_FAILED) return OUT_OF_MEMORY;
  fill_fresh(region);
  region.flags = flags;
  regions()[region.base] = region;
  machine().live[HOST_MEMORY]++;
  *at = reinterpret_cast<void*>(region.base);
  return OK;
}

API cuMemAllocHost_v2(void** at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }

// The driver API does not promise to wait here: a copy that still needs the buffer finds it freed
// and aborts (copy.cpp).
API cuMemFreeHost(void* at) {
  ENTER(INIT | UNSAFE);
  stall_all(call);
  Region* region = owned(reinterpret_cast<uintptr_t>(at), HOST_MEMORY, __func__);
  int failed = region->device->failed;
  close(*region, __func__);
  return failed;
}

// CUDA: page-locks memory of the program; CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED if a part of it
// already is. The driver locks whole pages, and takes physical memory for those that have none. It
// refuses memory that is not mapped.
API cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
  ENTER(ALIVE | UNSAFE);
  stall_all(call);
  uintptr_t base = reinterpret_cast<uintptr_t>(at);
  if (!at || !bytes || flags > 15) return INVALID_VALUE;
  uintptr_t first = base / PAGE * PAGE, end = (base + bytes + PAGE - 1) / PAGE * PAGE;
  for (const auto& [other, region] : regions())
    if (other / PAGE * PAGE < end && first < other + region.size) return HOST_MEMORY_ALREADY_REGISTERED;
  std::vector<unsigned char> resident((end - first) / PAGE);
  if (mincore(reinterpret_cast<void*>(first), end - first, resident.data())) return INVALID_VALUE;
  // Writes nothing: other threads may be writing.
  for (uintptr_t page = first; page < end; page += PAGE) __atomic_fetch_or(reinterpret_cast<char*>(page), 0, __ATOMIC_RELAXED);
  Region region;
  region.kind = REGISTERED;
  region.base = base;
  region.size = bytes;
  region.device = call.device;
  region.flags = flags;
  region.id = ++machine().ids;
  regions()[base] = region;
  machine().live[REGISTERED]++;
  return OK;
}

// CUDA: the base address of a registration, or CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED. It does not
// promise to wait: a copy that still needs the pages finds them unlocked and aborts (copy.cpp). A
// context that has failed returns its error, and the pages stay locked.
API cuMemHostUnregister(void* at) {
  ENTER(ALIVE | UNSAFE);
  stall_all(call);
  auto found = regions().find(reinterpret_cast<uintptr_t>(at));
  if (found == regions().end() || found->second.kind != REGISTERED) return HOST_MEMORY_NOT_REGISTERED;
  regions().erase(found);
  machine().live[REGISTERED]--;
  return OK;
}

API cuMemHostGetDevicePointer_v2(uintptr_t* device_pointer, void* at, unsigned) {
  ENTER(ALIVE);
  if (!pinned(reinterpret_cast<uintptr_t>(at), 1)) return INVALID_VALUE;
  *device_pointer = reinterpret_cast<uintptr_t>(at);  // unified addressing
  return OK;
}

API cuMemHostGetFlags(unsigned* flags, void* at) {
  ENTER(ALIVE);
  if (!pinned(reinterpret_cast<uintptr_t>(at), 1)) return INVALID_VALUE;
  *flags = region_at(reinterpret_cast<uintptr_t>(at))->flags;
  return OK;
}
