#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "core/memory_plan.h"
#include "model/lora/lora_config.h"
#include "model/micro_batch.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "model/recompute.h"
#include "model/tensor_parallel/tensor_group.h"
#include "ops/cross_entropy.h"

namespace sb {

struct StageOptions {
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::f32;  // of activations and of the weights the operations read: f32, or bf16 on CUDA
  int first_layer = 0;
  int last_layer = 0;  // exclusive
  Recompute recompute = Recompute::attention;
  int64_t max_micro_batch_tokens = 0;
  int64_t max_sequence_length = 0;  // positions of the rope table
  int slots = 1;                    // micro-batches in flight, at most
  // Tokens in all slots: memory is then divided anew as micro-batches come, few large slots or many small ones
  // (Stage::divide). 0: every slot is for max_micro_batch_tokens.
  int64_t kept_tokens = 0;
  int64_t max_cut_sequence = 0;       // the longest sequence that may come in pieces; 0: all come whole
  int64_t max_cut_tokens = 0;         // where ranks share it: the most of it that this one holds; 0: nobody does
  int64_t split_backward_tokens = 0;  // micro-batches up to this size may run backward in two halves
  int64_t loss_chunk = 1024;          // tokens per piece of the vocabulary projection
  int64_t layer_chunk = 32768;        // tokens per piece of a layer's projections and MLP
  int offload = 0;                    // layer inputs that wait for backward in host memory
  bool training = true;               // false: no gradients, no saved activations; forward() is evaluate()
  int shards = 1;                     // every group of the parameters can be cut into so many equal pieces
  bool with_values = true;            // false: the fp32 values are somebody else's (ParameterSet::set_values_owner)
  bool fp8 = false;                   // products of the layers from e4m3 codes; on the CPU a reference for tests
  std::vector<int> fp8_skip = {};     // layers whose products are not
  int kept_codes = -1;                // of the others, so many keep their weights' codes between updates; -1: all
  LoraConfig lora = {};               // with a rank the model itself is frozen but for what it names
  TensorShare tensor = {};            // of the ranks that share the products of this stage, this one

  // Layers whose products are from e4m3 codes, and those that keep their weights' codes.
  bool uses_fp8(int layer) const { return fp8 && std::ranges::count(fp8_skip, layer) == 0; }
  int fp8_layers() const {
    int count = 0;
    for (int layer = first_layer; layer < last_layer; ++layer) count += uses_fp8(layer);
    return count;
  }
  int layers_with_kept_codes() const { return kept_codes < 0 ? fp8_layers() : kept_codes; }
  // How these share the tokens of a micro-batch between the products.
  TokenShares token_shares() const { return {tensor, layer_chunk}; }
};

// UserError where the model's sizes do not allow it, or not with what else is asked for.
void check_fp8(const ModelConfig& config, const LoraConfig& lora);

// Told, during a backward, which group of the parameters (ParameterSet::groups()) it will not touch again: from the
// last one to the first.
using GradientsFinal = std::function<void(int group)>;

// A contiguous range of layers, with the embedding if it holds the first layer and final norm + vocabulary projection
// if it holds the last: the whole model on one process, one pipeline stage otherwise. All memory is taken in the
// constructor, on the device. The operations' temporaries come from the stage's own scratch memory, whatever
// exec.scratch is.
class Stage {
 public:
  // `group`: the ranks of options.tensor; null where this one is alone.
  Stage(const ModelConfig& config, const StageOptions& options, Attention& attention, int threads,
        TensorGroup* group = nullptr);
  ~Stage();

  // The parameters that such a stage trains, without memory.
  static ParameterSet declare_parameters(const ModelConfig& config, const StageOptions& options);
  // What the constructor will allocate, item by item.
  static MemoryPlan memory_plan(const ModelConfig& config, const StageOptions& options, const Attention& attention,
                                int threads);
  // The largest options.offload.
  static int most_offload(const StageOptions& options);
  // The smallest one with which the plan for it fits into `limit` bytes (0: unknown); the largest when none does.
  static int least_offload(const StageOptions& options, int64_t limit,
                           const std::function<MemoryPlan(int offload)>& plan);

  // The largest options.kept_codes with which the plan for it fits, after what else needs memory has been settled.
  static int most_kept_codes(const StageOptions& options, int64_t limit,
                             const std::function<MemoryPlan(int kept_codes)>& plan);

  // What was really used so far, by the names of the plan: weights and the like in full, the others at their highest.
  MemoryPlan memory_used() const;

  bool first() const;
  bool last() const;
  // Those that are trained: all of the model, or adapters and what is trained along with them.
  ParameterSet& parameters();
  // The rest of the model; without adapters there are none.
  ParameterSet& frozen_parameters();
  const ModelConfig& config() const;
  const StageOptions& options() const;

  // Random initialisation: normal(0, initializer_range), norms one, biases zero; a pure function of (seed, parameter
  // name).
  void initialize(uint64_t seed);

  // Makes the kept codes of the weights anew, if the parameters changed since they were made. forward() and evaluate()
  // do it themselves; who has just changed the weights may do it before anybody measures them.
  void round_weights(const Exec& exec);

  // How many of a micro-batch's rows this rank has between the products: all, unless others share these.
  int64_t rows(const MicroBatch& batch) const { return options().token_shares().own(batch.size()); }

  // With options.kept_tokens, while nothing is in flight: the first `slots` slots are for micro-batches of at most
  // `tokens` tokens from here on.
  void divide(int slots, int64_t tokens);

  // The pieces of a sequence go forward one after the other, with nothing between them but what is done with earlier
  // micro-batches, and backward in reverse order; a piece's slot keeps its keys and values for those after it until its
  // own backward.
  //
  // Runs a micro-batch forward in a slot. `input` [rows(batch), H] is the previous stage's output, empty on the first
  // stage. Returns this stage's output [rows(batch), H]; on the last stage the loss is computed instead (see loss()),
  // in training with its gradient in the same pass. The returned view stays valid until backward of the slot. The
  // micro-batch must live till then.
  TensorView forward(const Exec& exec, const MicroBatch& batch, int slot, TensorView input);
  // Forward alone, for validation and tests, in training too: no gradients, nothing saved; backward cannot follow. The
  // returned view stays valid until the next call.
  TensorView evaluate(const Exec& exec, const MicroBatch& batch, int slot, TensorView input);
  // `output_gradient` [rows(batch), H] is empty on the last stage. Parameter gradients accumulate. Returns the gradient
  // of the input, empty on the first stage; valid until the next call.
  TensorView backward(const Exec& exec, const MicroBatch& batch, int slot, TensorView output_gradient,
                      const GradientsFinal& gradients_final = {});
  // The same in two halves, with the same bits, where nobody but the stage's own weights waits for the second: what the
  // stage before needs, and the gradients of the products' weights. The second half follows before anything else runs
  // here. For micro-batches of at most options.split_backward_tokens, not on the first stage.
  TensorView backward_input(const Exec& exec, const MicroBatch& batch, int slot, TensorView output_gradient,
                            const GradientsFinal& gradients_final = {});
  void backward_weights(const Exec& exec, const MicroBatch& batch, int slot,
                        const GradientsFinal& gradients_final = {});

  // Last stage: sums of the micro-batch most recently run forward in the slot, and its token losses [T]. On CUDA loss()
  // waits until the device has come to the end of that forward: ask after backward is queued, and the device never
  // waits.
  LossSums loss(int slot) const;
  TensorView token_loss(int slot) const;
  // The same in host memory, after forward() of a micro-batch with sources and loss().
  std::span<const float> host_token_loss(int slot) const;

  // Last stage, after evaluate() in the slot, of a model that no ranks share: logits [rows, V] of rows of the
  // micro-batch, in the stage's type.
  void logits(const Exec& exec, int slot, int64_t row_begin, int64_t row_end, TensorView logits) const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace sb
