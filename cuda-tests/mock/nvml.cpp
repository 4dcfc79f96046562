// The management library: the clocks of the device at PCI address 0000:01:00.0. NVML: every function
// but the first fails with NVML_ERROR_UNINITIALIZED (1) before nvmlInit.
#include <atomic>
#include <cstring>

#include "state.h"

static std::atomic<int> started = 0;
static char device;
enum { UNINITIALIZED = 1, INVALID = 2, MISSING = 6 };

API nvmlInit_v2() { return started++, 0; }
API nvmlShutdown() { return started ? started--, 0 : UNINITIALIZED; }
API nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** found) {
  if (!started) return UNINITIALIZED;
  if (strcmp(address, "0000:01:00.0")) return MISSING;
  return *found = &device, 0;
}
API nvmlDeviceGetClockInfo(void* of, int kind, unsigned* mhz) {
  {
    std::lock_guard<std::mutex> lock(mock::machine().lock);
    mock::machine().calls[__func__]++;
  }
  if (!started) return UNINITIALIZED;
  if (of != &device || kind < 0 || kind > 3) return INVALID;
  return *mhz = kind == 2 ? 2619 : 1980, 0;
}
API nvmlDeviceGetTemperature(void* of, int sensor, unsigned* celsius) {
  if (!started) return UNINITIALIZED;
  if (of != &device || sensor) return INVALID;
  return *celsius = 41, 0;
}
API nvmlDeviceGetCurrentClocksThrottleReasons(void* of, unsigned long long* bits) {
  if (!started) return UNINITIALIZED;
  if (of != &device) return INVALID;
  return *bits = 1, 0;  // idle
}
