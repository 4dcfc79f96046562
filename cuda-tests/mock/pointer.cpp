// The driver's records of an address.
#include "region.h"

namespace mock {
enum { HOST = 1, DEVICE = 2 };

struct Known {
  unsigned type = 0;  // of memory
  Device* device = nullptr;
  uintptr_t start = 0;
  size_t size = 0;
  bool mapped = false;
  uint64_t id = 0;
};

// A reservation without a mapping at the address is not memory: known, but without a type.
static bool look(uintptr_t at, Known& known) {
  const Region* region = region_at(at);
  if (!region) return false;
  known = {unsigned(region->kind == DEVICE_MEMORY ? DEVICE : HOST), region->device, region->base, region->size, true, region->id};
  if (region->kind != RESERVATION) return true;
  known.type = 0;
  known.mapped = false;
  auto after = mappings().upper_bound(at);
  if (after == mappings().begin()) return true;
  const auto& [base, mapping] = *std::prev(after);
  if (at - base >= mapping.bytes) return true;
  known = {DEVICE, mapping.physical->device, base, mapping.bytes, true, region->id};
  return true;
}

static int answer(void* data, int attribute, uintptr_t at, const Known& known) {
  bool valid = known.type != 0;
  switch (attribute) {
    case 1: *static_cast<void**>(data) = valid ? known.device : nullptr; return OK;
    case 2: *static_cast<unsigned*>(data) = known.type; return OK;
    case 3: *static_cast<uintptr_t*>(data) = valid ? at : 0; return OK;
    case 4: *static_cast<uintptr_t*>(data) = known.type == HOST ? at : 0; return OK;
    case 7: *static_cast<unsigned long long*>(data) = known.id; return OK;
    case 8: *static_cast<unsigned*>(data) = 0; return OK;                                       // managed: never
    case 9: *static_cast<int*>(data) = valid ? known.device->ordinal : -2; return OK;           // CU_DEVICE_INVALID
    case 11: *static_cast<uintptr_t*>(data) = known.start; return OK;
    case 12: *static_cast<size_t*>(data) = known.size; return OK;
    case 13: *static_cast<unsigned*>(data) = known.mapped; return OK;
    default: return NOT_SUPPORTED;
  }
}
}  // namespace mock

using namespace mock;

// CUDA: CUDA_ERROR_INVALID_VALUE for a pointer that was not allocated by, mapped by or registered
// with a context.
API cuPointerGetAttribute(void* data, int attribute, uintptr_t at) {
  ENTER(INIT);
  Known known;
  if (!data || !look(at, known)) return INVALID_VALUE;
  return answer(data, attribute, at, known);
}

// CUDA: succeeds for an unknown pointer, unlike the call above; the attributes are then null
// values.
API cuPointerGetAttributes(unsigned count, const int* attributes, void** data, uintptr_t at) {
  ENTER(INIT);
  Known known;
  look(at, known);
  for (unsigned i = 0; i < count; i++)
    if (int code = answer(data[i], attributes[i], at, known)) return code;
  return OK;
}

API cuMemGetAddressRange_v2(uintptr_t* base, size_t* bytes, uintptr_t at) {
  ENTER(ALIVE);
  Known known;
  if (!look(at, known) || !known.type) return NOT_FOUND;
  if (base) *base = known.start;
  if (bytes) *bytes = known.size;
  return OK;
}
