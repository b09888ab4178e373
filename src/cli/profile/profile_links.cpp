#include "cli/profile/profile_links.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "cli/exit_code.h"
#include "cli/output_file.h"
#include "cli/profile/measure_links.h"
#include "cli/profile/measured_date.h"
#include "comm/host_name.h"
#include "comm/world.h"
#include "core/files/durable_file.h"
#include "core/log.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "plan/latency/links_file.h"
#include "train/rank_device.h"

namespace sb {
namespace {

constexpr int64_t kBuffer = int64_t{64} << 20;

MeasuredLinks::Way over_gpus(Communicator& world, const MachineRanks& machine, const std::vector<std::string>& hosts) {
  RunConfig config;
  config.device = DeviceKind::cuda;
  const RankDevice device(config, world, machine.index, machine.cores);
  Arena arena = make_arena("links", kBuffer, DeviceKind::cuda);
  const TensorView buffer = arena.allocate(DType::f32, {kBuffer / 4});
  zero_now(buffer);
  const LinkTarget target{world, device.data(), buffer.raw(), kBuffer,
                          [&] { cuda::synchronize(device.exec().stream); }};
  return {device.over_nccl() ? "NCCL" : "MPI through host memory", measure_links(target, hosts)};
}

void print(const char* what, const MeasuredLinks::Way& way) {
  Links links = way.links;
  links.source = way.over;
  fmt::print("{}: {}\n", what, describe(links));
}

void measure(const LinkArguments& arguments, Communicator& world) {
  if (world.rank() == 0) check_output(arguments.out);
  const MachineRanks machine = ranks_on_this_machine(world);
  MeasuredLinks measured;
  measured.date = measured_date();
  measured.hosts = host_names(world);
  std::vector<float> buffer(static_cast<size_t>(kBuffer / 4), 0.0f);
  measured.host = {"MPI", measure_links({world, world, buffer.data(), kBuffer, {}}, measured.hosts)};
  if (arguments.gpu) measured.gpu = over_gpus(world, machine, measured.hosts);
  world.barrier();
  if (world.rank() != 0) return;
  // What cannot be read again must not be written.
  const std::string text = write_links(measured);
  const MeasuredLinks read = parse_links(text, arguments.out);
  replace_file(arguments.out, text);
  print("host memory", *read.host);
  if (read.gpu) print("GPUs", *read.gpu);
  fmt::print("wrote {}\n", arguments.out);
}

}  // namespace

void profile_links(const LinkArguments& arguments) {
  const int launched = launched_ranks();
  SB_USER_CHECK(arguments.ranks == 0 || launched == 1 || launched == arguments.ranks,
                "--ranks {}: a launcher has already started {} ranks; remove it", arguments.ranks, launched);
  SB_USER_CHECK(launched > 1 || arguments.ranks > 1,
                "--links measures between the ranks that will train: start it as they are started (mpirun, srun), or "
                "give --ranks for ranks on this machine");
  if (launched == 1) {
    std::vector<std::string> command = {
        "", "profile", "--links", arguments.out, "--device", arguments.gpu ? "cuda" : "cpu"};
    if (const int code = launch_local_ranks(arguments.ranks, std::move(command)).exit_code; code != 0)
      throw CLI::RuntimeError(code);
    return;
  }
  const std::unique_ptr<Communicator> world = open_world_communicator();
  log::set_prefix(fmt::format("rank {}", world->rank()));
  try {
    measure(arguments, *world);
  } catch (const std::exception& error) {
    // What is wrong on all ranks is said by rank 0, whose abort ends the others.
    if (world->rank() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    world->abort(error.what(), exit_code(error));
  }
}

}  // namespace sb
