#pragma once

// What the tests' NCCL leaves to where it runs.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fake_nccl {

struct Call {
  std::string kind;  // "all_reduce"; "": this rank has not called yet
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  int type = 0, op = 0, root = 0;
  void* stream = nullptr;
};

// One operation of all ranks of a communicator.
struct Operation {
  int64_t number = 0;       // of the communicator
  std::vector<Call> calls;  // by rank
  size_t arrived = 0;
  std::atomic<bool> accepted = false;  // NCCL would say that it is queued
  std::atomic<bool> done = false;
  std::shared_ptr<void> of_streams;  // for submit()
};

inline size_t element_bytes(int type) {
  return type == 1 ? 1 : type == 9 ? 2 : type == 2 || type == 7 ? 4 : 8;
}

// Moves the data of an operation that all ranks called.
void perform(Operation& operation);

// --- given by where it runs; under the library's lock
// -----------------------------------------------------------------
void submit(const std::shared_ptr<Operation>& operation, size_t rank);
void give_up(Operation& operation);
int device_of_caller(int rank);

}  // namespace fake_nccl
