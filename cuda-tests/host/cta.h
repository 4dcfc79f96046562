// Runs one CTA of a kernel on the calling thread.
#pragma once

#include "shim.h"

namespace shim {

// A kernel, compiled for the host.
struct Kernel {
  const char* name;
  // Calls the kernel as the thread given by `thread_index` and the other indices; arguments as in
  // `cuLaunchKernel`.
  void (*call)(void** arguments);
  unsigned parameter_bytes;
  // Returns true if threads of this launch wait for each other and so must be fibers.
  bool (*is_cooperative)(void** arguments);
};

void run_cta(const Kernel& kernel, Dim grid, Dim block, Dim index, void** arguments, bool is_descending);

}  // namespace shim
