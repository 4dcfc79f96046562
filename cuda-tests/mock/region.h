// Memory that the driver knows: who owns an address, and who may touch it.
//
// Device memory is host memory at the same address, between two guard areas that nobody may touch; what was freed is never given
// out again, so that a late access faults instead of reading a stranger's bytes. A reservation is an area without access; mapping
// puts physical memory (a part of one memory file) into it, and only cuMemSetAccess opens it.
#pragma once
#include "state.h"

namespace mock {
constexpr size_t PAGE = 4096;
constexpr size_t GRANULARITY = 64 << 10;  // of physical memory
constexpr unsigned char POISON = 0xA5;    // what fresh memory holds
constexpr unsigned char CANARY = 0xC7;    // between the end of an allocation and the next multiple of 256 bytes

struct Region {
  Kind kind = DEVICE_MEMORY;  // DEVICE_MEMORY, HOST_MEMORY, REGISTERED or RESERVATION
  uintptr_t base = 0;
  size_t size = 0;
  Device* device = nullptr;   // whose context made it
  void* area = nullptr;       // with the guards
  size_t area_bytes = 0;
  unsigned flags = 0;
  bool coming = false;        // allocated in stream order, and the stream is not there yet
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
// Whether `device` may read (or write) all of the bytes now.
bool may_touch(const Device& device, uintptr_t at, size_t bytes, bool write);
// Pinned or registered host memory, all of it?
bool pinned(uintptr_t at, size_t bytes);
// Counts physical memory; false where the device has no more of it.
bool take(Device& device, size_t bytes);
void give(Device& device, size_t bytes);

// fault.cpp: runs `body`; a bad access inside it ends it. Returns 0, or the code with which the device fails.
void install_fault_handler();
int guarded(void (*body)(void*), void* data);
}  // namespace mock
