#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace sb {

// How many ranks the launcher of this process (mpirun, srun, mpiexec) started, by its environment; 1 without a
// launcher. UserError where processes were started that cannot find each other.
int launched_ranks();

// The module that lets MPI ranks talk; empty: this build has none.
std::filesystem::path find_mpi_module();

// A process of the run that is gone, as one of the others found out.
struct LostRank {
  int rank;
  std::string place;   // "host-b", or "host-b, GPU 3"
  std::string reason;  // "rank 3 on host-b ended without a word: …"
};

struct WorldOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);        // of a wait
  std::chrono::milliseconds start_timeout = std::chrono::seconds(60);  // until all ranks have found each other
  // Whether this process was asked to stop: then its launcher may be ending the others, too, which is no loss of
  // theirs.
  std::function<bool()> stopping = [] { return false; };
  std::function<void(const LostRank&)> lost = {};  // called on one of the ranks that are left, on a thread of its own
};

// All ranks of this run: a group of one without a launcher, the MPI processes with one. MPI is a module that is loaded
// only then; a program that runs alone needs none.
std::unique_ptr<Communicator> open_world_communicator(const WorldOptions& options = {});

// Runs `command` (a program and its arguments) as `ranks` processes on this machine under mpirun, also as root and with
// more ranks than cores. SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks themselves: mpirun would leave them no
// time to save anything. `command[0]` "" stands for this program.
struct Launched {
  int exit_code;         // 128 + number when a signal ended it
  bool stopped = false;  // one of the signals came
};
Launched launch_local_ranks(int ranks, std::vector<std::string> command);

}  // namespace sb
