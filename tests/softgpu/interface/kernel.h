#pragma once

// What the two halves of the software device know of a kernel. The sources launch it (cuda/launch.h); the runtime
// (runtime/) keeps it in a stream until its turn; the engine (engine/) then runs its blocks.

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstddef>
#include <functional>
#include <span>
#include <string>

namespace softgpu {

struct Kernel {
  // Called by every thread of every block. It has the arguments by value, as a GPU has when the launch returns.
  std::function<void()> body;
  const void* function = nullptr;  // the kernel itself; null for what a library runs in a kernel's place
  std::string library_name;        // its name then
  dim3 grid, block;
  size_t dynamic_shared = 0;
  cudaStream_t stream = nullptr;
  // May start while the kernel before it on its stream still runs (programmatic dependent launch).
  bool early = false;

  std::string name() const;
};

// --- given by the engine ---------------------------------------------------------------------------------------------

// cudaSuccess, or why a GPU such as the current one refuses the launch: an empty grid, too many threads, too much
// shared memory, more dynamic shared memory than the kernel was allowed.
cudaError_t refusal(const Kernel& kernel);

// Runs kernels to their end, in the calling thread: the first, and with it those behind it on its stream that are
// `early` (a kernel, then early ones only). One call at a time in the process.
void run_kernels(std::span<const Kernel> chain);

// "sb::gpu::forward_kernel<64>" of a function of this program, from its symbol table.
std::string function_name(const void* function);

// Ends the program with a message, and where a thread of a kernel runs, with that kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Says on stderr what a function of the host's refuses: CUDA's codes alone are hard to read.
void say_refused(const char* of_what, const char* format, std::va_list arguments);

// Whether the caller is a thread of a kernel: no runtime function may be called there.
bool in_kernel();

// --- given by the runtime --------------------------------------------------------------------------------------------

// Puts a kernel that the engine does not refuse behind what is in its stream; a refused one becomes the last error, as
// cudaGetLastError() finds it.
cudaError_t enqueue_kernel(Kernel kernel);

// Whether all these bytes belong to one allocation on the device that lives (or to page-locked host memory, which the
// device may touch too). The copy engine asks before it touches them.
bool device_may_touch(const void* memory, size_t bytes);

}  // namespace softgpu
