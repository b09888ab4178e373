// The CUDA side of a build without CUDA.

#include "core/errors.h"
#include "device/cuda.h"
#include "device/cuda_products.h"

namespace sb {
namespace {

[[noreturn]] void refuse() {
  throw UserError(
      "device: cuda was requested, but this program was built without CUDA; use device: cpu, or build with the cuda "
      "preset");
}

}  // namespace

namespace cuda {

std::string problem() {
  return "this program was built without CUDA";
}
void require_device() {
  refuse();
}
DeviceInfo device_info() {
  refuse();
}
int device_count() {
  refuse();
}
void use_device(int) {
  refuse();
}
int current_device() {
  refuse();
}
int processes() {
  return -1;
}
Allocations allocations() {
  return {};
}
std::shared_ptr<void> allocate(const std::string&, int64_t) {
  refuse();
}
std::shared_ptr<void> allocate_host(int64_t) {
  refuse();
}
void copy(void*, const void*, void*, int64_t) {
  refuse();
}
void zero(void*, void*, int64_t) {
  refuse();
}
void copy_and_wait(const void*, void*, int64_t) {
  refuse();
}
void zero_and_wait(void*, int64_t) {
  refuse();
}
std::shared_ptr<void> make_stream() {
  refuse();
}
void synchronize(void*) {
  refuse();
}
std::shared_ptr<void> make_event(bool) {
  refuse();
}
void record(void*, void*) {
  refuse();
}
void wait(void*) {
  refuse();
}
bool passed(void*) {
  refuse();
}
void wait_on_stream(void*, void*) {
  refuse();
}
double milliseconds_between(void*, void*) {
  refuse();
}

}  // namespace cuda

struct CudaProducts::Implementation {};
CudaProducts::CudaProducts() {
  refuse();
}
CudaProducts::~CudaProducts() = default;
void CudaProducts::measure_algorithms(bool) {
  refuse();
}
void CudaProducts::run(void*, const CudaProduct&) {
  refuse();
}

}  // namespace sb
