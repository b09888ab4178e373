#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "cli/commands.h"
#include "comm/device/nccl_library.h"
#include "comm/world.h"
#include "core/cpu_isa.h"
#include "core/errors.h"
#include "core/memory_plan.h"
#include "core/thread_pool.h"
#include "data/tokenizer/tokenizer.h"
#include "device/cuda.h"
#include "device/rate/matmul_rate.h"
#include "run/host_memory.h"
#include "run/machine.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// What was looked at, what was found, and what to do where something is missing.
struct Finding {
  std::string what, found, cure;
};

std::string value_in(const char* file, const std::string& key) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(": ");
    return colon == std::string::npos ? line : line.substr(colon + 2);
  }
  return {};
}

Finding processor() {
  const std::string cores = machine_text(DeviceKind::cpu, available_cores());
  try {
    return {"processor", fmt::format("{}, {} kernels", cores, cpu_isa() == CpuIsa::avx512 ? "AVX-512" : "AVX2"), ""};
  } catch (const UserError& old) {
    return {"processor", cores, old.what()};
  }
}

Finding matmuls() {
  try {
    ThreadPool pool(available_cores());
    const MatmulSpeed speed = measure_matmul_speed(pool);
    return {"matmuls",
            fmt::format("{}: {:.2f} of the processor's peak of {:.0f} ({:.0f} a thread)",
                        describe_matmul_rate(speed.rate, pool.threads()), speed.rate / speed.peak, speed.peak * 1e-9,
                        speed.peak * 1e-9 / pool.threads()),
            advise(speed, cpu_isa())};
  } catch (const Error& problem) {
    return {"matmuls", "not measured", problem.what()};
  }
}

Finding memory() {
  const int64_t bytes = available_host_memory(1);
  return {"memory", bytes > 0 ? format_bytes(bytes) + " available" : "unknown", ""};
}

Finding disk() {
  std::error_code error;
  const fs::space_info room = fs::space(".", error);
  if (error) return {"disk", "unknown: " + error.message(), ""};
  return {"disk",
          fmt::format("{} free in {}", format_bytes(static_cast<int64_t>(room.available)), fs::current_path().string()),
          ""};
}

Finding gpu() {
  if (const std::string problem = cuda::problem(); !problem.empty())
    return {"GPU", "none usable", problem + " (not needed to train on the CPU)"};
  const cuda::DeviceInfo info = cuda::device_info();
  const std::string driver = value_in("/proc/driver/nvidia/version", "NVRM version");
  std::string text = fmt::format("{} x {}, compute capability {}.{}, {} of {} free, {} kernels", cuda::device_count(),
                                 info.name, info.major, info.minor, format_bytes(info.free_bytes),
                                 format_bytes(info.total_bytes), info.major == 9 ? "Hopper" : "portable");
  if (!driver.empty()) text += "; driver " + driver;
  return {"GPU", text, ""};
}

Finding nccl() {
  try {
    const int version = NcclLibrary("libnccl.so.2").version();
    return {"NCCL", fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100), ""};
  } catch (const UserError& missing) {
    return {"NCCL", "not found", std::string(missing.what()) + " (only needed for ranks on several GPUs)"};
  }
}

fs::path in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const fs::path file = fs::path(folder) / program; access(file.c_str(), X_OK) == 0) return file;
  return {};
}

Finding mpi() {
  const fs::path module = find_mpi_module(), mpirun = in_path("mpirun");
  if (module.empty())
    return {"MPI", "not in this build",
            "needed to run several ranks: install libopenmpi-dev and openmpi-bin, then build again"};
  if (mpirun.empty())
    return {"MPI", "module " + module.string() + ", but no mpirun", "install openmpi-bin to start several ranks"};
  return {"MPI", fmt::format("{}, module {}", mpirun.string(), module.string()), ""};
}

Finding tokenizer() {
  // A tokenizer of no tokens: refused for that where there is one, and for PCRE2 and ICU where there is none.
  try {
    Tokenizer::parse("{}", "doctor");
  } catch (const UserError& error) {
    const std::string reason = error.what();
    if (reason.find("this build has no tokenizer") != std::string::npos)
      return {"tokenizer", "not in this build", reason};
  }
  return {"tokenizer", "byte-level BPE (tokenizer.json)", ""};
}

void doctor() {
  size_t missing = 0;
  for (const Finding& finding : {processor(), matmuls(), memory(), disk(), gpu(), nccl(), mpi(), tokenizer()}) {
    fmt::print("{:<11} {}\n", finding.what, finding.found);
    if (finding.cure.empty()) continue;
    ++missing;
    fmt::print("{:<11}   -> {}\n", "", finding.cure);
  }
  fmt::print("\n{}\n", missing == 0 ? "Nothing is missing."
                                    : "Lines with -> say what is missing or slow, and what to do about it.");
}

}  // namespace

void add_doctor_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("doctor", "check this machine: what is available, and what is missing");
  command->callback([] { doctor(); });
}

}  // namespace sb
