#include "parallel/sharded_adamw.h"

#include <algorithm>

#include "device/memory.h"

namespace sb {

ShardedAdamW::ShardedAdamW(ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas)
    : parameters_(parameters),
      layout_(layout),
      replicas_(replicas),
      arena_(make_arena("optimizer", bytes(parameters.flat_elements(), layout.shards(), parameters.has_values()),
                        parameters.gradients().device())) {
  SB_CHECK(replicas.size() == layout.shards(), "{} replicas, {} shards", replicas.size(), layout.shards());
  if (!parameters.has_values()) {
    values_ = arena_.allocate(DType::f32, {layout.shard_elements()});
    zero_now(values_);
    parameters.set_values_owner([this](const TensorView& all) { take_values(all); });
  }
  first_moment_ = arena_.allocate(DType::f32, {layout.shard_elements()});
  second_moment_ = arena_.allocate(DType::f32, {layout.shard_elements()});
  zero_now(first_moment_);
  zero_now(second_moment_);
  // Neighbours of the same kind are updated together; the padding between them is zero and stays zero.
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    const int64_t end = parameter.offset + parameter.elements();
    if (!decay_ranges_.empty() && decay_ranges_.back().decay == parameter.decay)
      decay_ranges_.back().end = end;
    else
      decay_ranges_.push_back({parameter.offset, end, parameter.decay});
  }
}

int64_t ShardedAdamW::bytes(int64_t flat_elements, int shards, bool with_values) {
  return (with_values ? 2 : 3) * Arena::rounded(flat_elements / shards * dtype_bytes(DType::f32));
}

void ShardedAdamW::take_values(const TensorView& all) {
  const HostCopy own(values_);
  for (int bucket = 0; bucket < layout_.buckets(); ++bucket) {
    const FlatRange piece = layout_.piece(bucket, replicas_.rank());
    std::copy(all.f32() + piece.begin, all.f32() + piece.end, own.view().f32() + layout_.place(bucket));
  }
  own.store();
}

double ShardedAdamW::squared_norm(const Exec& exec, int left_out) const {
  // Where one rank has all pieces they are one: fewer, larger kernels.
  if (exec.device == DeviceKind::cuda && layout_.shards() == 1 && left_out < 0)
    return sb::squared_norm(exec, parameters_.gradients());
  std::vector<TensorView> pieces;
  for (const FlatRange& piece : layout_.pieces(replicas_.rank(), left_out))
    pieces.push_back(parameters_.gradients().rows(piece.begin, piece.end));
  return sb::squared_norm(exec, pieces);
}

void ShardedAdamW::update(const Exec& exec, const AdamWStep& step) {
  std::vector<CommRequest> gathering;
  for (int bucket = 0; bucket < layout_.buckets(); ++bucket) {
    const FlatRange own = layout_.piece(bucket, replicas_.rank());
    std::vector<DecayRange> ranges;  // of the piece
    for (const DecayRange& kind : decay_ranges_) {
      const int64_t begin = std::max(own.begin, kind.begin), end = std::min(own.end, kind.end);
      if (begin < end) ranges.push_back({begin - own.begin, end - own.begin, kind.decay});
    }
    const auto flat = [&](const TensorView& buffer) {
      return buffer.empty() ? TensorView() : buffer.rows(own.begin, own.end);
    };
    const int64_t place = layout_.place(bucket);
    adamw_update(exec, step, ranges,
                 {values_.empty() ? flat(parameters_.values()) : values_.rows(place, place + own.size()),
                  flat(parameters_.gradients()), first_moment_.rows(place, place + own.size()),
                  second_moment_.rows(place, place + own.size()), flat(parameters_.rounded_weights()), TensorView()});
    // On its way while the next bucket is updated.
    if (replicas_.size() > 1) {
      const TensorView read =
          parameters_.rounded_weights().empty() ? parameters_.values() : parameters_.rounded_weights();
      const FlatRange range = layout_.bucket(bucket);
      gathering.push_back(replicas_.all_gather_async(read.rows(range.begin, range.end).raw(),
                                                     own.size() * dtype_bytes(read.dtype()), CommType::u8));
    }
  }
  for (CommRequest& request : gathering) request.wait();
}

}  // namespace sb
