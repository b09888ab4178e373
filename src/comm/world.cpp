#include "comm/world.h"

#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "comm/message_communicator.h"
#include "comm/self_communicator.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "sparsebalance_mpi.so";

// 0: not set.
int number_in_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return 0;
  const std::string_view view = text;
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  SB_USER_CHECK(error == std::errc() && end == view.data() + view.size() && value > 0,
                "environment: {}={} is no number of ranks; unset it, or start with mpirun or srun", name, text);
  return value;
}

std::unique_ptr<Transport> open_module() {
  const fs::path path = find_mpi_module();
  SB_USER_CHECK(!path.empty(),
                "{} ranks were started, but the module {} that lets them talk is not next to {}: this build has no "
                "MPI. Install libopenmpi-dev, configure and build again; or run a single process without mpirun",
                launched_ranks(), kModule, fs::read_symlink("/proc/self/exe").string());
  // Global: the library loads further modules of its own that look for its symbols.
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module == nullptr)
    throw UserError("{} does not load: {}. Install openmpi-bin, or run a single process without mpirun", path.string(),
                    dlerror());
  const auto open = reinterpret_cast<OpenTransport>(dlsym(module, kTransportEntry));
  if (open == nullptr)
    throw UserError("{} is not of this program (no {}); build again", path.string(), kTransportEntry);
  const auto is_open_mpi = reinterpret_cast<TransportIsOpenMpi>(dlsym(module, kTransportIsOpenMpi));
  const bool by_pmi = std::getenv("PMI_RANK") != nullptr && std::getenv("PMIX_RANK") == nullptr &&
                      std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
  SB_USER_CHECK(
      !by_pmi || is_open_mpi == nullptr || !is_open_mpi(),
      "{} ranks were started that would find each other by PMI (srun --mpi=pmi2, or the mpiexec of MPICH), but "
      "this program was built with Open MPI, which takes PMIx: start with srun --mpi=pmix (`srun --mpi=list` "
      "shows whether it is there), or with Open MPI's mpirun",
      launched_ranks());
  char error[512] = "";
  std::unique_ptr<Transport> transport(open(error, sizeof error));
  if (!transport) throw UserError("MPI does not start: {}", error);
  return transport;
}

}  // namespace

// Next to the program, installed beside it, or in a build tree (src/cli, and folders of tests/ and bench/, next to
// src/comm).
fs::path find_mpi_module() {
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path();
  for (const char* place : {".", "../lib/sparsebalance", "../comm", "../../src/comm"}) {
    fs::path candidate = folder / place / kModule;
    if (fs::exists(candidate)) return candidate.lexically_normal();
  }
  return {};
}

int launched_ranks() {
  if (const int ranks = number_in_environment("OMPI_COMM_WORLD_SIZE")) return ranks;
  // Slurm's number of tasks of this step; a batch script that is no step itself has none.
  if (const int tasks = number_in_environment("SLURM_STEP_NUM_TASKS"); tasks > 1) {
    SB_USER_CHECK(std::getenv("PMIX_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr,
                  "srun started {} tasks without connecting them; start with srun --mpi=pmix", tasks);
    return tasks;
  }
  // MPICH's mpiexec and its kin. Where the module is of another MPI, that one knows of one rank, which is an error.
  if (const int ranks = number_in_environment("PMI_SIZE"); ranks > 1) return ranks;
  // Each of its processes would train the whole model by itself.
  if (std::getenv("TORCHELASTIC_RUN_ID") != nullptr)
    SB_USER_CHECK(number_in_environment("WORLD_SIZE") <= 1,
                  "torchrun started {} processes, which do not find each other here: start them with mpirun, with srun "
                  "--mpi=pmix, or on one machine with --ranks",
                  number_in_environment("WORLD_SIZE"));
  return 1;
}

std::unique_ptr<Communicator> open_world_communicator(const WorldOptions& options) {
  const int ranks = launched_ranks();
  if (ranks == 1) return make_self_communicator("world", options.timeout);
  std::unique_ptr<Communicator> world = make_watched_communicator(open_module, options);
  SB_USER_CHECK(world->size() == ranks,
                "the launcher started {} ranks, but MPI knows of {}: it is another MPI than the one this program was "
                "built with; use the mpirun of that one",
                ranks, world->size());
  return world;
}

}  // namespace sb
