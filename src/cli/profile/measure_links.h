#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "plan/latency/links_file.h"

namespace sb {

// How links are measured: the ranks, where the data lies, and how one waits for it.
struct LinkTarget {
  Communicator& world;     // in host memory
  Communicator& data;      // the same ranks; the world, or in the memory of their GPUs
  void* buffer = nullptr;  // of `bytes`, as `data` wants it
  int64_t bytes = 0;
  std::function<void()> finish;  // until all that was queued is done; empty: it is when wait() returns
};

// Times messages, reduce-scatter and all-gather between ranks of one host and across hosts, sizes up to the buffer's.
// `hosts`: of every rank. Collective; every rank gets the same links.
Links measure_links(const LinkTarget& target, const std::vector<std::string>& hosts);

}  // namespace sb
