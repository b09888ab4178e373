#include "train/rank_device.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "comm/device/device_communicator.h"
#include "comm/host_name.h"
#include "core/errors.h"
#include "core/log.h"
#include "device/cuda.h"
#include "ops/adamw.h"
#include "parallel/grid.h"

namespace sb {
namespace {

// The same for ranks on the same GPU, whatever number it has for each of them.
std::string gpu_identity() {
  return fmt::format("{} {}", host_name(), cuda::device_info().uuid);
}

// As NCCL tells GPUs apart, which takes a rank's word for the machine it is on. Tests give two ranks that share a GPU
// machines of their own that way; they then talk over sockets.
std::string gpu_identity_for_nccl() {
  const char* machine = std::getenv("NCCL_HOSTID");
  return machine == nullptr ? gpu_identity() : fmt::format("{} {}", machine, cuda::device_info().uuid);
}

std::multiset<std::string> texts_of_all(Communicator& world, const std::string& own) {
  const std::vector<std::string> all = gather_texts(world, own, 0);
  std::string joined;
  for (const std::string& text : all) joined += text + '\n';
  joined = broadcast_text(world, std::move(joined), 0);
  std::multiset<std::string> texts;
  for (size_t begin = 0; begin < joined.size();) {
    const size_t end = joined.find('\n', begin);
    texts.insert(joined.substr(begin, end - begin));
    begin = end + 1;
  }
  return texts;
}

int different(const std::multiset<std::string>& texts) {
  return static_cast<int>(std::set(texts.begin(), texts.end()).size());
}

}  // namespace

RankDevice::RankDevice(const RunConfig& config, Communicator& world, int local_rank, int threads)
    : pool_(threads), ranks_(world.size()) {
  cuda::require_device();
  // A launcher may show each rank its own GPU alone, or all of them to all.
  cuda::use_device(local_rank % cuda::device_count());
  gpu_name_ = cuda::device_info().name;
  const std::multiset<std::string> identities = texts_of_all(world, gpu_identity());
  sharing_ = static_cast<int>(identities.count(gpu_identity()));
  gpus_ = different(identities);
  const int gpus_for_nccl = different(texts_of_all(world, gpu_identity_for_nccl()));

  using Backend = ParallelOptions::Backend;
  const bool shared = gpus_ < ranks_;
  SB_USER_CHECK(config.parallel.backend != Backend::nccl || gpus_for_nccl == ranks_,
                "parallel.backend: nccl needs one GPU per rank, but {} ranks have {}: start fewer ranks (smaller "
                "parallel.dp, pp, cp or tp), or set parallel.backend: staged",
                ranks_, gpus_);
  nccl_ = config.parallel.backend == Backend::nccl || (config.parallel.backend == Backend::automatic && !shared);
  if (shared && world.rank() == 0)
    log::warning("{} ranks share {} GPU{}: they take turns, and their data goes {}", ranks_, gpus_,
                 gpus_ == 1 ? "" : "s", nccl_ ? "through NCCL's sockets" : "through host memory");
  context_ = std::make_unique<DeviceContext>(DeviceKind::cuda, pool_, norm_scratch_bytes(DeviceKind::cuda));
  const DeviceCommOptions options{DeviceKind::cuda, exec().stream};
  data_ = nccl_ ? make_nccl_communicator(world, options) : make_staged_communicator(world, options);
}

std::string RankDevice::text() const {
  return fmt::format("{} ranks on {} GPU{} ({}), data {}", ranks_, gpus_, gpus_ == 1 ? "" : "s", gpu_name_,
                     nccl_ ? "over NCCL" : "through host memory");
}

}  // namespace sb
