#include "python/bindings/packed_cuda_attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "attention/gpu/launch/head_dim_check.h"
#include "attention/most_sequences.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "python/bindings/packed_attention.h"

namespace sb::python {
namespace {

// Layers differ in whether they run dense, and in nothing else: one that does not is enough.
int different_layers(const SelectionConfig& config) {
  int64_t last = -1;
  for (const int64_t layer : config.dense_layers) last = std::max(last, layer);
  return static_cast<int>(last) + 2;
}

std::unique_ptr<SelectingAttention> make_attention(const SelectionConfig& config,
                                                   const PackedCudaAttention::Options& options, int device) {
  const std::string why = cuda::problem();
  SB_USER_CHECK(why.empty(),
                "there is no GPU that this build of sparsebalance can use ({}); keep the tensors on the CPU", why);
  cuda::use_device(device);
  CudaAttentionOptions made;
  made.attention.selection = config;
  made.attention.layers = different_layers(config);
  made.attention.largest_budget = options.largest_budget;
  made.deterministic = options.deterministic;
  made.portable = options.portable;
  return make_cuda_attention(made);
}

}  // namespace

PackedCudaAttention::PackedCudaAttention(const SelectionConfig& config, const Options& options, int device,
                                         void* stream)
    : config_(config),
      layers_(different_layers(config)),
      device_(device),
      stream_(stream),
      attention_(make_attention(config, options, device)) {}

int PackedCudaAttention::layer_of(int layer) const {
  return std::min(layer, layers_ - 1);
}

int64_t PackedCudaAttention::scratch_bytes(const AttentionShape& shape, int64_t tokens) const {
  const int64_t planes = config_.judges_by_planes() ? plane_word_count(shape.kv_heads, config_.score_channels) : 0;
  return attention_->scratch_bytes(shape, tokens, 1) + Arena::rounded(4 * planes);
}

PackedCudaAttention::Present PackedCudaAttention::present(const PackedCall& call) const {
  Present present;
  for (size_t s = 0; s + 1 < call.cu_seqlens.size(); ++s) {
    if (call.cu_seqlens[s + 1] == call.cu_seqlens[s]) continue;
    present.cu_seqlens.push_back(call.cu_seqlens[s + 1]);
    present.places.push_back(static_cast<int32_t>(s));
    if (!call.budgets.empty()) present.budgets.push_back(call.budgets[s]);
  }
  const int64_t tokens = call.cu_seqlens.back(), most = most_packed_sequences(tokens);
  SB_USER_CHECK(std::ssize(present.places) <= most,
                "{} sequences in {} tokens; at most {} are planned for, tokens / 64 + 64: pack fewer short ones into a "
                "call, or spread them over several",
                present.places.size(), tokens, most);
  return present;
}

void PackedCudaAttention::forward(const PackedCall& call, const PackedSeen& seen, std::span<uint8_t> scratch,
                                  std::span<uint8_t> host_lists) {
  check_call(config_, call);
  require_cuda_head_dim(call.shape.head_dim, call.operands.q.dtype(), "q",
                        {"narrower heads are needed", "float32 has kernels for others"});
  const Present here = present(call);
  const int layer = layer_of(call.layer);
  std::vector<float> corrections;
  bool selects = false;
  for (const int32_t place : here.places) {
    const SequenceTiles tiles = tiles_of(config_, call, place);
    if (config_.learns_thresholds()) corrections.push_back(threshold_of(call, place));
    selects = selects || !runs_dense(config_, layer, tiles);
  }
  if (config_.judges_by_planes()) {
    check_score_channels(config_, call.shape.head_dim);
    if (selects) planes_of(call.planes, call.shape, config_.score_channels);  // says what is wrong
  }
  GivenSelection given;
  given.planes = call.planes;
  given.corrections = corrections;
  given.counts = seen.counts.data();
  given.places = here.places;
  given.sums = seen.sums.data();

  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(busy_);
  cuda::use_device(device_);
  Arena arena("scratch", scratch.data(), std::ssize(scratch), DeviceKind::cuda);
  const Exec exec{.device = DeviceKind::cuda, .stream = stream_, .scratch = &arena};
  if (!seen.counts.empty()) cuda::zero(stream_, seen.counts.data(), std::ssize(seen.counts) * int64_t{sizeof(int64_t)});
  const auto state = make_cuda_state(call.lists.data(), std::ssize(call.lists), &given);
  attention_->forward(exec, layer, call.shape, here.sequences(), call.operands, *state, /*replay=*/false);
  if (host_lists.empty()) return;
  ThreadPool pool(1);
  write_lists(read_block_index(*state, pool), call.cu_seqlens.back(), host_lists, pool);
}

void PackedCudaAttention::backward(const PackedCall& call, const AttentionGradients& gradients,
                                   std::span<uint8_t> scratch) {
  check_call(config_, call);
  const Present here = present(call);
  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(busy_);
  cuda::use_device(device_);
  Arena arena("scratch", scratch.data(), std::ssize(scratch), DeviceKind::cuda);
  const Exec exec{.device = DeviceKind::cuda, .stream = stream_, .scratch = &arena};
  const auto state = make_cuda_state(call.lists.data(), std::ssize(call.lists));
  attention_->backward(exec, layer_of(call.layer), call.shape, here.sequences(), call.operands, gradients, *state);
}

}  // namespace sb::python
