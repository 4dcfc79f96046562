// Bad accesses of kernels: a fault inside `guarded` ends the kernel and fails the device with
// CUDA_ERROR_ILLEGAL_ADDRESS.
//
// CUDA: a load or store at an invalid address kills the context. Faults outside a kernel are passed
// to the previously installed handler. A kernel is left by a long jump, so it must not own any
// resources.
#include <csetjmp>
#include <csignal>

#include "region.h"

namespace mock {
static thread_local sigjmp_buf* escape = nullptr;
static struct sigaction before_segv, before_bus;

static void on_fault(int signal, siginfo_t* info, void* context) {
  if (sigjmp_buf* target = escape) {
    escape = nullptr;
    siglongjmp(*target, 1);
  }
  struct sigaction& before = signal == SIGSEGV ? before_segv : before_bus;
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  sigaction(signal, &before, nullptr);  // the access is repeated, and ends the process
}

void install_fault_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  // No mask, so that the jump need not restore one; on the thread's alternative stack if it has
  // one.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
}

int guarded(void (*body)(void*), void* data) {
  sigjmp_buf here;
  if (sigsetjmp(here, 0)) return ILLEGAL_ADDRESS;
  escape = &here;
  body(data);
  escape = nullptr;
  return OK;
}
}  // namespace mock
