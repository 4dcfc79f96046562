// Runs one CTA of a kernel on the thread that asks for it.
#pragma once

#include "shim.h"

namespace shim {

// A kernel, compiled for the host.
struct Kernel {
  const char* name;
  // Calls it as the thread that `thread_index` and the like name; arguments as `cuLaunchKernel` takes them.
  void (*call)(void** arguments);
  unsigned parameter_bytes;
  // Whether threads of this launch wait for each other, so that they must be fibers.
  bool (*is_cooperative)(void** arguments);
};

void run_cta(const Kernel& kernel, Dim grid, Dim block, Dim index, void** arguments, bool is_descending);

}  // namespace shim
