#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace sb {

struct ThreadCommOptions {
  std::chrono::milliseconds timeout{60000};
  // How long a message from one rank of the world to another takes, for tests of what hides behind what: it starts when
  // both sides have asked for it and the link is free, and both wait until it is over. Collectives take no extra time.
  // Nothing: as fast as memory.
  std::function<std::chrono::nanoseconds(int from, int to, int64_t bytes)> transfer_time;
};

// The members of a group "world" of ranks that are threads of this process. Reductions add in rank order; the rank that
// comes last to a collective does its work, so nothing needs a thread of its own. A message is copied when both sides
// have asked for it: a send without its receive waits, as a large one does between processes.
//
// Calls that do not fit together (another operation, other counts) fail at once on all ranks that made them.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int ranks, const ThreadCommOptions& options = {});

// Runs `body` once a rank, each on a thread. When one throws, the others' waits end; the first exception is rethrown.
void run_thread_ranks(int ranks, const std::function<void(Communicator& world)>& body,
                      const ThreadCommOptions& options = {});

}  // namespace sb
