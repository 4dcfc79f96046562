// Virtual memory management: reservations, physical memory, mappings, access.
//
// The physical memory of all devices is one memory file; each handle owns a range of it, whose
// pages are freed with the handle. Two mappings of one handle therefore show the same bytes, and
// the bytes outlive a mapping as long as the handle exists.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "region.h"

namespace mock {
std::map<uintptr_t, Mapping>& mappings() {
  static auto* all = new std::map<uintptr_t, Mapping>;
  return *all;
}

static int memory_file() {
  static int file = memfd_create("mock-cuda-physical", MFD_CLOEXEC);
  if (file < 0) die("no memory file");
  return file;
}

static size_t memory_end = 0;

static bool granular(size_t value) { return value % machine().rules.granularity == 0; }

// CUDA: memory is freed once its handle is released and no mapping of it is left.
static void free_if_unused(Physical* physical) {
  if (physical->alive || physical->mappings) return;
  fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset, physical->bytes);
  give(*physical->device, physical->bytes);
}

// Returns true if [at, at + bytes) consists of whole mappings without a gap.
static bool whole_mappings(uintptr_t at, size_t bytes) {
  uintptr_t next = at;
  while (next < at + bytes) {
    auto found = mappings().find(next);
    if (found == mappings().end()) return false;
    next += found->second.bytes;
  }
  return bytes && next == at + bytes;
}

static Region* reservation_of(uintptr_t at, size_t bytes) {
  Region* region = region_at(at);
  return region && region->kind == RESERVATION && region->holds(at, bytes) ? region : nullptr;
}
}  // namespace mock

using namespace mock;

struct Location { int type, id; };
struct AllocationProp { int type, handle_types; Location location; void* metadata; unsigned char flags[8]; };
struct AccessDesc { Location location; int flags; };

// CUDA: sizes, addresses and offsets of this API are multiples of the granularity.
API cuMemGetAllocationGranularity(size_t* granularity, const AllocationProp* prop, int) {
  ENTER(INIT);
  if (!granularity || !prop || prop->type != 1 || prop->location.type != 1) return INVALID_VALUE;
  *granularity = machine().rules.granularity;
  return OK;
}

API cuMemAddressReserve(uintptr_t* at, size_t bytes, size_t alignment, uintptr_t wish, unsigned long long flags) {
  ENTER(ALIVE | UNSAFE);
  (void)wish;  // CUDA: a hint
  if (!at || !bytes || !granular(bytes) || flags || (alignment & (alignment - 1))) return INVALID_VALUE;
  if (alignment < machine().rules.granularity) alignment = machine().rules.granularity;
  void* area = mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (area == MAP_FAILED) return OUT_OF_MEMORY;
  Region region;
  region.kind = RESERVATION;
  region.base = (reinterpret_cast<uintptr_t>(area) + alignment - 1) / alignment * alignment;
  region.size = bytes;
  region.device = call.device;
  region.id = ++machine().ids;
  regions()[*at = region.base] = region;
  machine().live[RESERVATION]++;
  return OK;
}

// CUDA: frees a whole reservation, given its exact size; all of it must be unmapped.
API cuMemAddressFree(uintptr_t at, size_t bytes) {
  ENTER(INIT | UNSAFE);
  auto found = regions().find(at);
  if (found == regions().end() || found->second.kind != RESERVATION) die("cuMemAddressFree: %p is not reserved", (void*)at);
  if (found->second.size != bytes) return INVALID_VALUE;
  auto mapped = mappings().lower_bound(at);
  if (mapped != mappings().end() && mapped->first < at + bytes) return INVALID_VALUE;
  regions().erase(found);  // the addresses stay inaccessible
  machine().live[RESERVATION]--;
  return OK;
}

// CUDA: handle types and RDMA capability must be supported (device attributes 103 and 110), or the
// creation fails. The attributes describe the device: what else these need (a driver module, rights of
// the process) may be missing, and be found missing here.
static bool supported(const AllocationProp& prop) {
  unsigned refused = machine().rules.refused;
  if ((prop.handle_types && refused & 1) || (prop.flags[1] && refused & 2)) return false;
  return (prop.handle_types == 0 || prop.handle_types == 1) && prop.flags[0] == 0 && prop.flags[1] <= 1;
}

// CUDA: type CU_MEM_ALLOCATION_TYPE_PINNED, on a device; takes the device's memory immediately,
// mapped or not.
API cuMemCreate(unsigned long long* handle, size_t bytes, const AllocationProp* prop, unsigned long long flags) {
  ENTER(ALIVE | UNSAFE);
  if (!handle || !prop || !bytes || !granular(bytes) || flags || prop->type != 1 || prop->location.type != 1) return INVALID_VALUE;
  stall(call, call.device);
  if (prop->location.id < 0 || prop->location.id >= machine().count) return INVALID_DEVICE;
  Device& device = machine().devices[prop->location.id];
  if (!device.virtual_memory || !supported(*prop)) return NOT_SUPPORTED;
  if (!take(device, bytes)) return OUT_OF_MEMORY;
  size_t offset = memory_end;
  memory_end += bytes;
  if (ftruncate(memory_file(), memory_end)) die("no memory file of %zu bytes", memory_end);
  if (bytes <= (size_t(64) << 20)) {  // CUDA does not clear fresh memory
    void* view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file(), offset);
    if (view != MAP_FAILED) {
      memset(view, POISON, bytes);
      munmap(view, bytes);
    }
  }
  *handle = reinterpret_cast<uintptr_t>(adopt(new Physical(&device, bytes, offset)));
  return OK;
}

// CUDA: the handle is destroyed; the memory stays while a mapping of it exists.
API cuMemRelease(unsigned long long handle) {
  ENTER(INIT | UNSAFE);
  Physical* physical = use<Physical>(reinterpret_cast<void*>(handle), PHYSICAL, __func__);
  destroy(physical);
  free_if_unused(physical);
  return OK;
}

// CUDA: offset must be zero; the range must lie in one reservation and contain no mapping; a fresh
// mapping is inaccessible.
API cuMemMap(uintptr_t at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  ENTER(ALIVE | UNSAFE);
  stall(call, call.device);
  Physical* physical = use<Physical>(reinterpret_cast<void*>(handle), PHYSICAL, __func__);
  if (!bytes || !granular(at) || !granular(bytes) || offset || flags || bytes > physical->bytes) return INVALID_VALUE;
  if (!reservation_of(at, bytes)) return INVALID_VALUE;
  auto next = mappings().lower_bound(at);
  if (next != mappings().end() && next->first < at + bytes) return INVALID_VALUE;
  if (next != mappings().begin() && std::prev(next)->first + std::prev(next)->second.bytes > at) return INVALID_VALUE;
  void* view = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_file(), physical->offset);
  if (view == MAP_FAILED) die("cannot map %zu bytes", bytes);
  mappings()[at] = Mapping{bytes, physical, {}};
  physical->mappings++;
  machine().live[MAPPING]++;
  return OK;
}

// CUDA: the range must consist of whole mappings. The call need not wait: work in flight that
// accesses the range faults, unless the call stalls the device.
API cuMemUnmap(uintptr_t at, size_t bytes) {
  ENTER(INIT | UNSAFE);
  if (!whole_mappings(at, bytes)) return INVALID_VALUE;
  stall(call, current);
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (uintptr_t next = at; next < at + bytes;) {
    auto found = mappings().find(next);
    next += found->second.bytes;
    Physical* physical = found->second.physical;
    mappings().erase(found);
    machine().live[MAPPING]--;
    physical->mappings--;
    free_if_unused(physical);
  }
  return OK;
}

// CUDA: the range must consist of whole mappings. A kernel's access is checked by page, for all
// devices alike; a copy's by device.
API cuMemSetAccess(uintptr_t at, size_t bytes, const AccessDesc* access, size_t count) {
  ENTER(ALIVE | UNSAFE);
  if (!whole_mappings(at, bytes) || !access || !count) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    const AccessDesc& one = access[i];
    if (one.location.type != 1 || one.location.id < 0 || one.location.id >= machine().count) return INVALID_DEVICE;
    if (one.flags != 0 && one.flags != 1 && one.flags != 3) return INVALID_VALUE;
  }
  for (uintptr_t next = at; next < at + bytes;) {
    Mapping& mapping = mappings().at(next);
    for (size_t i = 0; i < count; i++) mapping.access[&machine().devices[access[i].location.id]] = access[i].flags;
    int widest = 0;
    for (const auto& [device, flags] : mapping.access) widest |= flags;
    int protection = widest & 2 ? PROT_READ | PROT_WRITE : widest & 1 ? PROT_READ : PROT_NONE;
    if (mprotect(reinterpret_cast<void*>(next), mapping.bytes, protection)) die("cannot open %zu bytes", mapping.bytes);
    next += mapping.bytes;
  }
  return OK;
}
