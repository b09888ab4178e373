#pragma once

#include <cstdint>
#include <memory>
#include <string>

// The CUDA runtime behind plain types. A build without CUDA has no_cuda.cpp in place of cuda.cpp: there is no device
// and everything else refuses.
namespace sb::cuda {

// Why there is no usable device; empty: there is one.
std::string problem();
// UserError with the cure unless there is a usable device.
void require_device();

struct DeviceInfo {
  std::string name;
  int64_t total_bytes = 0, free_bytes = 0;
  int multiprocessors = 0;
  int major = 0, minor = 0;  // compute capability
  std::string uuid;          // the same device in every process
};
DeviceInfo device_info();

// Which of the machine's devices the calling thread uses, from 0; each thread has its own.
int device_count();
void use_device(int index);
int current_device();
// How many processes compute on the device now, this one included; -1: the driver does not tell.
int processes();

// How often this process took memory with the two functions below.
struct Allocations {
  int64_t device = 0, host = 0;
  bool operator==(const Allocations&) const = default;
};
Allocations allocations();
// Device memory; freed with its last owner. `name` is for the error.
std::shared_ptr<void> allocate(const std::string& name, int64_t bytes);
// Page-locked host memory that kernels can address too.
std::shared_ptr<void> allocate_host(int64_t bytes);

// In the order of `stream` (a cudaStream_t), either direction or none.
void copy(void* stream, const void* from, void* to, int64_t bytes);
void zero(void* stream, void* to, int64_t bytes);
// After everything queued on the device so far, and waits.
void copy_and_wait(const void* from, void* to, int64_t bytes);
void zero_and_wait(void* to, int64_t bytes);

std::shared_ptr<void> make_stream();
void synchronize(void* stream);

std::shared_ptr<void> make_event(bool measures_time = true);  // a cudaEvent_t
void record(void* event, void* stream);
void wait(void* event);                          // the host, for what was recorded
bool passed(void* event);                        // what was recorded is done
void wait_on_stream(void* event, void* stream);  // what is queued from now on, for what was recorded
double milliseconds_between(void* begin, void* end);

}  // namespace sb::cuda
