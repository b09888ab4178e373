#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/tensor.h"

namespace sb {

// What a rank computes with: the bits of a run depend on all of it but the host.
struct RankMachine {
  std::string host, device, kernels;
  int threads = 1;
  bool operator==(const RankMachine&) const = default;
};
RankMachine own_machine(DeviceKind device, int threads);
// Of all ranks, on rank 0; empty elsewhere. Collective.
std::vector<RankMachine> gather_machines(Communicator& world, const RankMachine& own);

// A line for every rank, or for ranks that follow each other with the same.
std::string rank_table(const std::vector<RankMachine>& ranks);
// In what ranks differ from the first one, in words; empty: in nothing.
std::string rank_differences(const std::vector<RankMachine>& ranks);

}  // namespace sb
