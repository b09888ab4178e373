#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/latency/latency_model.h"
#include "plan/latency/workload.h"
#include "plan/schedule/schedule.h"

namespace sb {

// The grid of workers. The ranks of one pipeline stand side by side: tensor parallel fastest, then context parallel,
// then stages, then data parallel.
struct Layout {
  int dp = 1;
  int pp = 1;
  int cp = 1;
  int tp = 1;
  // Forwards that a stage runs ahead, in multiples of its distance to the last one: 1 is plain 1F1B, 2 gives every
  // transfer one operation to hide behind.
  int warmup_depth = 1;
  bool comm = true;  // count transfers and the gradient reduction
  bool head = true;  // count embedding and loss
  // Length of the sequences that layers are split over the stages for; 0: twice the budget.
  int64_t split_tokens = 0;
  int element_bytes = 2;  // of weights and activations: bf16, or 4 for fp32
  int workers() const { return dp * pp * cp * tp; }
};

struct StageTime {
  double forward = 0, backward = 0;  // microseconds
};

// Whether, where sequences come in pieces, every stage but the first sends the gradient of its input before it computes
// those of its weights. Not where these hide the transfers of tensor-parallel ranks, or are the adapters' alone, or
// where layers are so narrow that reading their operands from memory once more costs what it gains.
constexpr bool splits_backward(int pp, int tp, bool adapters, int64_t hidden) {
  constexpr int64_t kNarrow = 512;
  return pp > 1 && tp == 1 && !adapters && hidden >= kNarrow;
}

// Latencies of this model in this layout: what stages and micro-batches take.
class CostModel {
 public:
  // Splits the layers over the stages so that the slowest stage is as fast as possible and the others are alike
  // (earlier stages get the remainder), each layer dense or sparse as it runs. UserError when there are more stages
  // than layers.
  CostModel(const LatencyModel& latency, AttentionSpec spec, Layout layout);
  // With a split that is given: where every stage begins, and one past the last layer.
  CostModel(const LatencyModel& latency, AttentionSpec spec, Layout layout, std::vector<int> first_layer);

  const AttentionSpec& spec() const { return spec_; }
  const Layout& layout() const { return layout_; }
  const Profile& profile() const { return latency_.profile(); }
  const ModelShape& shape() const { return profile().shape; }
  // What a worker has of every layer: less than shape() with tensor parallelism.
  const ModelShape& worker_shape() const { return worker_shape_; }
  int stages() const { return layout_.pp; }
  int layers() const { return static_cast<int>(shape().layers); }
  int first_layer(int stage) const { return first_layer_[static_cast<size_t>(stage)]; }
  int stage_layers(int stage) const {
    return first_layer_[static_cast<size_t>(stage) + 1] - first_layer_[static_cast<size_t>(stage)];
  }

  // Everything of a layer but attention, for a micro-batch of this many tokens; with tensor parallelism also what its
  // ranks tell each other of the layer.
  StageTime linear(double tokens) const;
  // Attention and selection of one layer; the sums of the micro-batch, before context and tensor parallelism divide
  // them.
  StageTime attention(const Work& work) const;
  // Embedding and loss, zero where the layout leaves them out; they belong to the last stage.
  StageTime head(double tokens) const;
  // Activations from stage-1 to stage (and gradients back), for a micro-batch.
  double transfer(int stage, double tokens) const {
    return stage == 0 ? 0.0 : transfer_[static_cast<size_t>(stage)](tokens);
  }
  bool splits_backward() const {
    return sb::splits_backward(layout_.pp, layout_.tp, profile().lora_rank > 0, shape().hidden);
  }
  // How much of linear().backward is left then.
  double after_input_gradient(const StageTime& linear) const;
  // From the end of the next stage's backward until its gradient is here; `split`: it leaves before that.
  double gradient_transfer(int stage, double tokens, const StageTime& linear, bool split) const;
  // What the sums of the gradients leave over after the last backward of a stage, and the gathering of the weights
  // before its first forward.
  const Exposed& tail(int stage) const { return tail_[static_cast<size_t>(stage)]; }
  const Exposed& gather(int stage) const { return gather_[static_cast<size_t>(stage)]; }
  void add_exposed(PipelineTimes& times) const;

 private:
  void check() const;
  void share_layers();
  void split_layers();
  void prepare_communication();
  double gathering(double tokens) const;
  Link transfer_per_token(int stage) const;
  struct Bucket;
  std::vector<Bucket> buckets_of(int stage, const LinkGroup& replicas) const;
  void add_exposed_of(int stage);
  double ends_of(int stage, int replicas) const;
  std::vector<double> groups_of(int stage) const;
  int used_in_node() const;

  const LatencyModel& latency_;
  AttentionSpec spec_;
  Layout layout_;
  ModelShape worker_shape_;
  double linear_share_ = 1;  // of a layer's products, by tensor parallelism
  std::vector<int> first_layer_;
  std::vector<Link> transfer_;  // into every stage, over tokens
  std::vector<Exposed> tail_, gather_;
};

}  // namespace sb
