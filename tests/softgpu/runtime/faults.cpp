#include "softgpu/runtime/faults.h"

#include <signal.h>

#include <cstdio>

#include "softgpu/interface/kernel.h"
#include "softgpu/runtime/device_memory.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

struct sigaction before[2];  // of SIGSEGV and SIGBUS: a sanitizer's, or the default

// The program ends here in any case, so that functions are called which a handler may not call otherwise.
void report(int signal, siginfo_t* info, void*) {
  sigaction(signal, &before[signal == SIGBUS], nullptr);
  const std::string what = DeviceMemory::get().describe(info->si_addr);
  if (what.empty()) return;  // somebody else's: comes again
  if (Scheduler::is_in_turn()) fail("it touches %s", what.c_str());
  std::fprintf(stderr, "softgpu: the host's code touches %s, without a kernel or a copy\n", what.c_str());
  // Comes again, to the debugger or the sanitizer, who say where.
}

}  // namespace

void report_faults() {
  struct sigaction action {};
  action.sa_sigaction = &report;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before[0]);
  sigaction(SIGBUS, &action, &before[1]);
}

}  // namespace softgpu
