// Initialization, devices and their primary contexts.
//
// A context's handle is the address of its device; a device has only the primary context.
#include <cstdio>

#include "region.h"

namespace mock {
static bool exists(int ordinal) { return ordinal >= 0 && ordinal < machine().count; }
}  // namespace mock

using namespace mock;

// CUDA: must be called before any other function, with flags 0; CUDA_ERROR_NO_DEVICE on a machine
// without a device.
API cuInit(unsigned flags) {
  ENTER(NOTHING);
  if (flags) return INVALID_VALUE;
  if (!machine().count) return NO_DEVICE;
  if (!machine().initialised) {
    machine().initialised = true;
    install_fault_handler();
    start_worker();
  }
  return OK;
}

// CUDA: returns 1000 * major + 10 * minor of the newest CUDA version that the driver supports;
// works before cuInit.
API cuDriverGetVersion(int* version) {
  ENTER(NOTHING);
  *version = machine().version;
  return OK;
}

API cuDeviceGetCount(int* count) {
  ENTER(INIT);
  *count = machine().count;
  return OK;
}

API cuDeviceGet(int* device, int ordinal) {
  ENTER(INIT);
  if (!exists(ordinal)) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}

API cuDeviceGetName(char* name, int bytes, int device) {
  ENTER(INIT);
  if (!exists(device) || bytes <= 0) return exists(device) ? INVALID_VALUE : INVALID_DEVICE;
  snprintf(name, bytes, "kvpool mock device %d", device);
  return OK;
}

API cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  ENTER(INIT);
  if (!exists(device)) return INVALID_DEVICE;
  for (int i = 0; i < 16; i++) uuid[i] = static_cast<unsigned char>(i == 15 ? device : 0x4d);
  return OK;
}
API cuDeviceGetUuid(unsigned char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceTotalMem_v2(size_t* bytes, int device) {
  ENTER(INIT);
  if (!exists(device)) return INVALID_DEVICE;
  *bytes = machine().devices[device].capacity;
  return OK;
}

API cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
  ENTER(INIT);
  if (!exists(ordinal)) return INVALID_DEVICE;
  const Device& device = machine().devices[ordinal];
  switch (attribute) {
    case 1: case 2: case 3: *value = 1024; return OK;           // threads per block, in x, in y
    case 4: *value = 64; return OK;                             // in z
    case 5: *value = 0x7fffffff; return OK;                     // CTAs in x
    case 6: case 7: *value = 65535; return OK;
    case 8: *value = 48 << 10; return OK;                       // bytes of shared memory per block
    case 10: *value = 32; return OK;                            // threads per warp
    case 12: case 82: *value = 65536; return OK;                // registers
    case 13: case 36: *value = 1000000; return OK;              // kHz
    case 16: *value = device.processors; return OK;
    case 33: *value = ordinal + 1; return OK;                   // PCI bus
    case 34: case 50: *value = 0; return OK;
    case 37: *value = 5120; return OK;                          // width of the memory bus in bits
    case 38: *value = 50 << 20; return OK;                      // L2 cache
    case 39: *value = 2048; return OK;
    case 40: *value = 3; return OK;                             // copy engines
    case 20: *value = device.compute_mode; return OK;           // 0 default, 2 prohibited, 3 exclusive to a process
    case 19: case 31: case 41: case 78: case 90: case 99: *value = 1; return OK;
    case 91: *value = device.reaches_pages; return OK;
    case 75: *value = device.major; return OK;
    case 76: *value = device.minor; return OK;
    case 102: case 103: case 110: *value = device.virtual_memory; return OK;
    case 115: *value = device.pools; return OK;
    case 97: *value = device.major >= 9 ? 232448 : 166912; return OK;  // shared memory of a block, opt-in
    default: *value = 0; return attribute > 0 && attribute < 160 ? OK : INVALID_VALUE;
  }
}

API cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER(INIT);
  if (!exists(device)) return INVALID_DEVICE;
  Device& one = machine().devices[device];
  if (one.retained++ == 0) machine().live[PRIMARY]++;
  *context = &one;
  return OK;
}

// CUDA: the last release destroys the context; without a matching retain,
// CUDA_ERROR_INVALID_CONTEXT.
API cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER(INIT | UNSAFE);
  if (!exists(device)) return INVALID_DEVICE;
  Device& one = machine().devices[device];
  if (!one.retained) return INVALID_CONTEXT;
  if (one.retained == 1) {
    until_all_done(call, &one);
    machine().live[PRIMARY]--;
    one.peers.clear();
  }
  one.retained--;
  return OK;
}

API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  ENTER(INIT);
  if (!exists(device)) return INVALID_DEVICE;
  *flags = 0;
  *active = machine().devices[device].retained > 0;
  return OK;
}

// CUDA: each thread has its own current context.
API cuCtxGetCurrent(void** context) {
  ENTER(INIT);
  *context = current;
  return OK;
}

API cuCtxSetCurrent(void* context) {
  ENTER(INIT);
  Device* device = static_cast<Device*>(context);
  if (device && (device < machine().devices || device >= machine().devices + 8)) die("cuCtxSetCurrent: %p is not a context", context);
  if (device && !device->retained) return CONTEXT_IS_DESTROYED;
  current = device;
  return OK;
}

// CUDA: each thread has a stack of contexts; the current one is its top.
static thread_local std::vector<Device*> below;

API cuCtxPushCurrent_v2(void* context) {
  ENTER(INIT);
  Device* device = static_cast<Device*>(context);
  if (!device) return INVALID_CONTEXT;
  if (device < machine().devices || device >= machine().devices + 8) die("cuCtxPushCurrent: %p is not a context", context);
  if (!device->retained) return CONTEXT_IS_DESTROYED;
  below.push_back(current);
  current = device;
  return OK;
}

// CUDA: the context below becomes current. CUDA_ERROR_INVALID_CONTEXT if the stack is empty.
API cuCtxPopCurrent_v2(void** context) {
  ENTER(INIT);
  if (below.empty()) return INVALID_CONTEXT;
  if (context) *context = current;
  current = below.back();
  below.pop_back();
  return OK;
}

API cuCtxGetDevice(int* device) {
  ENTER(CONTEXT);
  *device = call.device->ordinal;
  return OK;
}

API cuCtxGetApiVersion(void*, unsigned* version) {
  ENTER(INIT);
  *version = 3020;
  return OK;
}

API cuCtxSetFlags(unsigned) {
  ENTER(CONTEXT);
  return OK;
}

// CUDA: waits for all earlier work of the context, and returns its error if some of it failed.
// While a stream of the context is capturing: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
API cuCtxSynchronize(void) {
  ENTER(ALIVE | UNSAFE);
  Device* device = call.device;
  for (Stream* stream : machine().streams)
    if (stream->device == device && stream->capture) return invalidate(stream->capture), CAPTURE_UNSUPPORTED;
  return until_all_done(call, device);
}

API cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER(INIT);
  if (!exists(device) || !exists(peer)) return INVALID_DEVICE;
  *can = device != peer;
  return OK;
}

// CUDA: gives the current context access to the peer's memory, in one direction.
API cuCtxEnablePeerAccess(void* context, unsigned flags) {
  ENTER(ALIVE | UNSAFE);
  Device* peer = static_cast<Device*>(context);
  if (flags) return INVALID_VALUE;
  if (!peer || !peer->retained || peer == call.device) return INVALID_CONTEXT;
  return call.device->peers.insert(peer->ordinal).second ? OK : PEER_ACCESS_ALREADY_ENABLED;
}

API cuCtxDisablePeerAccess(void* context) {
  ENTER(ALIVE | UNSAFE);
  Device* peer = static_cast<Device*>(context);
  if (!peer) return INVALID_CONTEXT;
  return call.device->peers.erase(peer->ordinal) ? OK : PEER_ACCESS_NOT_ENABLED;
}
