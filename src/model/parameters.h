#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/tensor.h"
#include "device/memory.h"
#include "model/lora/lora_config.h"
#include "model/tensor_parallel/tensor_share.h"

namespace sb {

// One tensor of the model inside the flat parameter buffer. Several Hugging Face tensors may share one (q, k and v
// projections lie in one matrix so that one product computes them): each has its own name and row range there.
struct Parameter {
  std::string name;  // "layers.3.qkv.weight"
  Shape shape;
  int64_t offset;  // elements from the start of the flat buffers, aligned to 16 elements
  bool decay;      // two or more dimensions
  struct Part {
    std::string hf_name;  // "model.layers.3.self_attn.q_proj.weight"
    int64_t row_begin, row_end;
    TensorCut cut = {};  // what these rows are of the whole tensor
  };
  std::vector<Part> parts;  // in row order, covering all rows
  int64_t elements() const { return shape.elements(); }
};

// One Hugging Face tensor, or a rank's part of one: a run of elements of the flat buffers.
struct FlatTensor {
  std::string name;
  std::vector<int64_t> shape;  // of the whole
  int64_t begin, end;          // what is here
  TensorCut cut = {};

  // Of the whole.
  int64_t elements() const;
  // body(first element here, counted from `begin`, where it lies in the whole, how many) for all that lie side by side
  // in both.
  void each_run(const std::function<void(int64_t here, int64_t whole, int64_t count)>& body) const;
  // This rank's part of a whole tensor's values, and back.
  void take_part(const float* whole, float* part) const;
  void put_part(const float* part, float* whole) const;
};

FlatTensor flat_tensor(const Parameter& parameter, const Parameter::Part& part);

// Elements of the flat buffers that several ranks of a tensor-parallel group have alike. The gradient of each rank is a
// part of theirs.
struct SharedElements {
  int64_t begin, end;
  int copies, copy;  // as TensorCut says
};

// The parameters of a stage: values and gradients as two flat fp32 buffers of equal layout (moments follow the same
// layout), which is what the optimizer, its sharding and checkpoints work on. On CUDA the operations may read a copy of
// the values in bf16, the weights, which the optimizer writes along with them; the values themselves may then be
// somebody else's (an optimizer that is spread over ranks).
class ParameterSet {
 public:
  // Declares a parameter; all are declared before allocate().
  int declare(std::string name, Shape shape, std::vector<Parameter::Part> parts);
  // Ends a group of parameters whose gradients become final together. Padding lets it be cut into `shards` equal,
  // aligned pieces, and gives it room for `at_least` so many elements (of the rank that has the most of it, so that all
  // ranks of a tensor-parallel group cut it alike).
  void end_group(int shards, int64_t at_least = 0);
  void allocate(bool with_gradients, DeviceKind device = DeviceKind::cpu, DType weights = DType::f32,
                bool with_values = true);

  int count() const { return static_cast<int>(parameters_.size()); }
  const Parameter& parameter(int index) const { return parameters_[index]; }
  struct Group {
    int64_t begin, end;  // elements of the flat buffers
  };
  const std::vector<Group>& groups() const { return groups_; }
  // All Hugging Face tensors, in the order of the buffers.
  std::vector<FlatTensor> flat_tensors() const;
  // In that order, too; neighbours that the same ranks have are joined.
  std::vector<SharedElements> shared_elements() const;
  TensorView value(int index) const;
  // What the operations read: the value itself, or its rounded copy.
  TensorView weight(int index) const;
  TensorView gradient(int index) const;
  // The flat buffers, padding included (padding is zero).
  TensorView values() const;
  // Rounded copies of all values; empty when the operations read the values themselves.
  TensorView rounded_weights() const;
  TensorView gradients() const;
  int64_t flat_elements() const { return flat_elements_; }
  // Bytes of one flat buffer.
  int64_t flat_bytes() const { return flat_elements_ * dtype_bytes(DType::f32); }
  // Sum of the parameters' elements, without padding.
  int64_t elements() const;
  void zero_gradients(const Exec& exec = {});
  // The same for a step about to run, without touching most of the memory: gradients that products make (of two
  // dimensions) keep what they hold until add_to_gradient() was asked for, which tells the first product to write.
  void begin_gradients(const Exec& exec = {});
  // Whether a product has to add to the gradient instead of writing it; after the first time it has.
  bool add_to_gradient(int index);
  // Zeros for the gradients of a group that nothing was written to since.
  void complete_gradients(const Exec& exec, int group);

  // The values where the host can read and write them, for loading and saving; changes count after store_values(),
  // which waits for the device.
  HostCopy host_values() const;
  void store_values(const HostCopy& values);
  // Counts the changes of what the operations read, so that whoever keeps something made from it (fp8 codes) sees when
  // to make it anew. Whoever writes through the views above says so here.
  int64_t version() const { return version_; }
  void weights_changed() { ++version_; }
  // Who has the values where they are not here: gets all of them (fp32, on the host) with every store_values(). Nobody,
  // where they are not trained.
  using ValuesOwner = std::function<void(const TensorView& values)>;
  void set_values_owner(ValuesOwner owner) { values_owner_ = std::move(owner); }
  // Who brings weights from elsewhere while operations run: asked before elements [begin, end) are read or written
  // through anything here, to wait until they are there.
  using Arrival = std::function<void(int64_t begin, int64_t end)>;
  void set_arrival(Arrival arrival) { arrival_ = std::move(arrival); }
  bool has_values() const { return !flat_values_.empty(); }
  bool has_gradients() const { return !flat_gradients_.empty(); }
  // Parameters that nobody trains, in bf16: the rounded weights are all there is, and values can only be put in.
  bool is_rounded_only() const { return !flat_weights_.empty() && !has_values() && !values_owner_; }
  // Puts in one tensor of such parameters, rounded; waits for the device.
  void store_rounded(const FlatTensor& tensor, const float* values);
  // A parameter's part of any buffer of the flat layout.
  TensorView part(const TensorView& flat, int index) const;

 private:
  void await(int64_t begin, int64_t end) const {
    if (arrival_) arrival_(begin, end);
  }
  void await(int index) const { await(parameter(index).offset, parameter(index).offset + parameter(index).elements()); }

  std::vector<Parameter> parameters_;
  std::vector<Group> groups_;
  int64_t flat_elements_ = 0;
  std::unique_ptr<Arena> values_, gradients_, weights_;
  TensorView flat_values_, flat_gradients_, flat_weights_;
  std::vector<bool> unwritten_;  // gradients, since begin_gradients()
  int64_t version_ = 0;
  ValuesOwner values_owner_;
  Arrival arrival_;
};

// A parameter and the set that it lies in; index -1: the model has none of this kind.
struct ParameterPlace {
  ParameterSet* set = nullptr;
  int index = -1;

  TensorView weight() const { return index < 0 ? TensorView() : set->weight(index); }
  bool trained() const { return index >= 0 && set->has_gradients(); }
  // Empty where it is not trained.
  TensorView gradient() const { return trained() ? set->gradient(index) : TensorView(); }
  bool add_to_gradient() const { return set->add_to_gradient(index); }
};

// Where the parameters of a stage go as they are declared: to those that are trained, which without adapters are all of
// them, or to those that stay as they are. What is trained along with adapters has the names that PEFT gives it.
class StageParameters {
 public:
  StageParameters(ParameterSet& trained, ParameterSet& frozen, const LoraConfig& lora, const TensorShare& share = {})
      : trained_(trained), frozen_(frozen), lora_(lora), share_(share) {}

  enum class Kind { product, norm, embedding, head };
  bool trains(Kind kind) const;
  ParameterPlace declare(Kind kind, std::string name, Shape shape, std::vector<Parameter::Part> parts);
  ParameterPlace declare_adapter(std::string name, Shape shape, std::vector<Parameter::Part> parts);
  const LoraConfig& lora() const { return lora_; }
  // The rank whose parameters these are.
  const TensorShare& share() const { return share_; }

 private:
  ParameterSet& trained_;
  ParameterSet& frozen_;
  const LoraConfig& lora_;
  TensorShare share_;
};

}  // namespace sb
