#include "train/rank_device.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "comm/device/device_communicator.h"
#include "core/errors.h"
#include "core/log.h"
#include "device/cuda.h"
#include "ops/adamw.h"
#include "parallel/grid.h"

namespace sb {
namespace {

// The same for ranks on the same GPU, whatever number it has for each of them.
std::string gpu_identity() {
  char machine[256] = {};
  gethostname(machine, sizeof machine - 1);
  return fmt::format("{} {}", machine, cuda::device_info().uuid);
}

}  // namespace

RankDevice::RankDevice(const RunConfig& config, Communicator& world, int local_rank, int threads)
    : pool_(threads), ranks_(world.size()) {
  cuda::require_device();
  // A launcher may show each rank its own GPU alone, or all of them to all.
  cuda::use_device(local_rank % cuda::device_count());
  gpu_name_ = cuda::device_info().name;
  const std::string own = gpu_identity();
  std::vector<std::string> all = gather_texts(world, own, 0);
  std::string joined;
  for (const std::string& identity : all) joined += identity + '\n';
  joined = broadcast_text(world, std::move(joined), 0);
  std::multiset<std::string> identities;
  for (size_t begin = 0; begin < joined.size();) {
    const size_t end = joined.find('\n', begin);
    identities.insert(joined.substr(begin, end - begin));
    begin = end + 1;
  }
  sharing_ = static_cast<int>(identities.count(own));
  gpus_ = static_cast<int>(std::set(identities.begin(), identities.end()).size());

  using Backend = ParallelOptions::Backend;
  const bool shared = gpus_ < ranks_;
  SB_USER_CHECK(config.parallel.backend != Backend::nccl || !shared,
                "parallel.backend: nccl needs a GPU for each rank, but {} ranks have {}: start fewer ranks (smaller "
                "parallel.dp, pp, cp or tp), or set parallel.backend: staged",
                ranks_, gpus_);
  nccl_ = config.parallel.backend == Backend::nccl || (config.parallel.backend == Backend::automatic && !shared);
  if (shared && world.rank() == 0)
    log::warning("{} ranks share {} GPU{}: they take turns, and their data goes through host memory", ranks_, gpus_,
                 gpus_ == 1 ? "" : "s");
  context_ = std::make_unique<DeviceContext>(DeviceKind::cuda, pool_, norm_scratch_bytes(DeviceKind::cuda));
  const DeviceCommOptions options{DeviceKind::cuda, exec().stream};
  data_ = nccl_ ? make_nccl_communicator(world, options) : make_staged_communicator(world, options);
}

std::string RankDevice::text() const {
  return fmt::format("{} ranks on {} GPU{} ({}), data {}", ranks_, gpus_, gpus_ == 1 ? "" : "s", gpu_name_,
                     nccl_ ? "over NCCL" : "through host memory");
}

}  // namespace sb
