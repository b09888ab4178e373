#include "parallel/sharded_adamw.h"

#include <algorithm>

#include "device/memory.h"
#include "model/initialization.h"

namespace sb {
namespace {

// The same on every rank that has the tensor, or a part of it: copies of one element are rounded alike.
MomentPlace place_of(const FlatTensor& tensor) {
  MomentPlace place{.tensor = name_hash(tensor.name)};
  if (tensor.cut.axis == TensorCut::Axis::rows) place.begin = tensor.cut.begin * (tensor.elements() / tensor.shape[0]);
  if (tensor.cut.axis == TensorCut::Axis::columns) {
    place.begin = tensor.cut.begin;
    place.run = tensor.cut.end - tensor.cut.begin;
    place.stride = tensor.cut.whole;
  }
  return place;
}

}  // namespace

ShardedAdamW::ShardedAdamW(ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas,
                           const Storage& storage)
    : parameters_(parameters),
      layout_(layout),
      replicas_(replicas),
      host_(storage.on_host ? std::make_unique<HostOptimizerState>(layout.shard_elements(),
                                                                   parameters.gradients().device(), storage.moments)
                            : nullptr),
      arena_(make_arena(
          "optimizer",
          storage.on_host ? 0 : bytes(parameters.flat_elements(), layout.shards(), parameters.has_values(), storage),
          parameters.gradients().device())),
      gather_(replicas) {
  SB_CHECK(replicas.size() == layout.shards(), "{} replicas, {} shards", replicas.size(), layout.shards());
  SB_CHECK(!storage.on_host || !parameters.has_values(), "values on the device, their moments in host memory");
  if (!parameters.has_values()) parameters.set_values_owner([this](const TensorView& all) { take_values(all); });
  if (replicas.size() > 1) parameters.set_arrival([this](int64_t begin, int64_t end) { gather_.await({begin, end}); });
  const auto zeros = [&](DType dtype) {
    const TensorView array = arena_.allocate(dtype, {layout_.shard_elements()});
    zero_now(array);
    return array;
  };
  if (!storage.on_host) {
    if (!parameters.has_values()) values_ = zeros(DType::f32);
    first_moment_ = zeros(storage.moments);
    second_moment_ = zeros(storage.moments);
  }
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    for (const Parameter::Part& part : parameter.parts) {
      const FlatTensor tensor = flat_tensor(parameter, part);
      tensors_.push_back({tensor.begin, tensor.end, parameter.decay, place_of(tensor)});
    }
  }
}

int64_t ShardedAdamW::bytes(int64_t flat_elements, int shards, bool with_values, const Storage& storage) {
  const int64_t elements = flat_elements / shards;
  if (storage.on_host) return HostOptimizerState::device_bytes(elements, storage.moments);
  return (with_values ? 0 : Arena::rounded(elements * dtype_bytes(DType::f32))) +
         2 * Arena::rounded(elements * dtype_bytes(storage.moments));
}

void ShardedAdamW::take_values(const TensorView& all) {
  const HostCopy own(values());
  for (int bucket = 0; bucket < layout_.buckets(); ++bucket) {
    const FlatRange piece = layout_.piece(bucket, replicas_.rank());
    std::copy(all.f32() + piece.begin, all.f32() + piece.end, own.view().f32() + layout_.place(bucket));
  }
  own.store();
}

double ShardedAdamW::squared_norm(const Exec& exec, int left_out, std::span<const FlatRange> not_counted) const {
  // Where one rank has all pieces they are one: fewer, larger kernels.
  if (exec.device == DeviceKind::cuda && layout_.shards() == 1 && left_out < 0 && not_counted.empty())
    return sb::squared_norm(exec, parameters_.gradients());
  std::vector<TensorView> pieces;
  for (const FlatRange& piece : layout_.pieces(replicas_.rank(), left_out)) {
    int64_t begin = piece.begin;
    const auto count_up_to = [&](int64_t end) {
      if (begin < end) pieces.push_back(parameters_.gradients().rows(begin, end));
    };
    for (const FlatRange& other : not_counted) {
      if (other.end <= begin || other.begin >= piece.end) continue;
      count_up_to(other.begin);
      begin = other.end;
    }
    count_up_to(piece.end);
  }
  return sb::squared_norm(exec, pieces);
}

void ShardedAdamW::update(const Exec& exec, const AdamWStep& step, const Elements& elements) const {
  const FlatRange& range = elements.range;
  std::vector<DecayRange> ranges;
  for (const DecayRange& tensor : tensors_) {
    const int64_t begin = std::max(range.begin, tensor.begin), end = std::min(range.end, tensor.end);
    if (begin >= end) continue;
    ranges.push_back({begin - range.begin, end - range.begin, tensor.decay, tensor.place});
    ranges.back().place.first = begin - tensor.begin;
  }
  adamw_update(exec, step, ranges,
               {elements.values, parameters_.gradients().rows(range.begin, range.end), elements.first_moment,
                elements.second_moment, elements.weights, TensorView()});
}

void ShardedAdamW::update(const Exec& exec, const AdamWStep& step) {
  await_weights();  // a rank without micro-batches has read none of them
  parameters_.weights_changed();
  const TensorView rounded = parameters_.rounded_weights(),
                   values = parameters_.has_values() ? parameters_.values() : TensorView();
  const auto weights = [&](int64_t begin, int64_t end) {
    return rounded.empty() ? TensorView() : rounded.rows(begin, end);
  };
  for (int bucket = 0; bucket < layout_.buckets(); ++bucket) {
    const FlatRange own = layout_.piece(bucket, replicas_.rank());
    const int64_t place = layout_.place(bucket), end = place + own.size();
    if (host_) {
      host_->update(exec, place, end, [&](const HostOptimizerState::Window& window) {
        const FlatRange range{own.begin + window.begin - place, own.begin + window.end - place};
        update(exec, step,
               {range, window.values, window.first_moment, window.second_moment, weights(range.begin, range.end)});
      });
    } else {
      update(exec, step,
             {own, values_.empty() ? values.rows(own.begin, own.end) : values_.rows(place, end),
              first_moment_.rows(place, end), second_moment_.rows(place, end), weights(own.begin, own.end)});
    }
    // On its way while the next bucket is updated, and while the next step's forward comes to it.
    if (replicas_.size() > 1) gather_.begin(exec, rounded.empty() ? values : rounded, layout_.bucket(bucket));
  }
}

}  // namespace sb
