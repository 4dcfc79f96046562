// Memory known to the driver: the owner of each address, and the devices that may access it.
//
// Device memory is host memory at the same address, between two inaccessible guard areas. Freed
// addresses are never reused, so that a late access faults instead of reading another allocation's
// bytes. A reservation is an area without access; mapping places physical memory (a part of one
// memory file) in it, and only cuMemSetAccess makes it accessible.
#pragma once
#include "state.h"

namespace mock {
constexpr size_t PAGE = 4096;
constexpr size_t ALIGNMENT = 512;         // of allocations
constexpr size_t SLAB = size_t(2) << 20;  // small allocations share one
constexpr unsigned char POISON = 0xA5;    // content of fresh memory
constexpr unsigned char CANARY = 0xC7;    // fills up to the next multiple of the alignment

struct Region {
  Kind kind = DEVICE_MEMORY;  // DEVICE_MEMORY, HOST_MEMORY, REGISTERED or RESERVATION
  uintptr_t base = 0;
  size_t size = 0;
  Device* device = nullptr;   // device of the context that made it
  void* area = nullptr;       // including the guards
  size_t area_bytes = 0;
  unsigned flags = 0;
  bool coming = false;        // allocated in stream order, and the stream has not reached it
  bool going = false;         // to be freed in stream order
  uint64_t id = 0;
  bool holds(uintptr_t at, size_t bytes) const { return at >= base && bytes <= size && at - base <= size - bytes; }
};

struct Physical : Handle {
  Device* device;
  size_t bytes, offset;  // in the memory file
  unsigned mappings = 0;
  Physical(Device* device, size_t bytes, size_t offset) : Handle(PHYSICAL), device(device), bytes(bytes), offset(offset) {}
};

struct Mapping {
  size_t bytes;
  Physical* physical;
  std::map<const Device*, unsigned> access;  // 1 read, 3 read and write
};

std::map<uintptr_t, Region>& regions();
std::map<uintptr_t, Mapping>& mappings();
Region* region_at(uintptr_t at);
// Returns true if `device` may currently read (or write) all of the bytes.
bool may_touch(const Device& device, uintptr_t at, size_t bytes, bool write);
// Returns true if all of the bytes are pinned or registered host memory.
bool pinned(uintptr_t at, size_t bytes);
// Returns true if only some of the bytes are of one pinned or registered area.
bool torn(uintptr_t at, size_t bytes);
// Aborts if registered memory has other pages than when it was registered.
void check_pages(uintptr_t at, size_t bytes);
// Takes `bytes` of the device's physical memory; returns false if the device has too little left.
bool take(Device& device, size_t bytes);
void give(Device& device, size_t bytes);

// fault.cpp: runs `body`; a bad access inside it ends it. Returns 0, or the code with which the
// device fails.
void install_fault_handler();
int guarded(void (*body)(void*), void* data);
}  // namespace mock
