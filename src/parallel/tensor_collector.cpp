#include "parallel/tensor_collector.h"

#include <algorithm>

#include "device/host_floats.h"

namespace sb {

const float* TensorCollector::replicated(const ModelLayout::Tensor& tensor, TensorView own) {
  return collect(
      tensor,
      [&](const ModelLayout::Tensor::Part& part) -> std::vector<Source> {
        return {{grid_.rank_of(0, tensor.stage, 0, part.tp_rank), part.flat.begin, part.flat.end - part.flat.begin}};
      },
      own);
}

const float* TensorCollector::sharded(const ModelLayout::Tensor& tensor, TensorView own) {
  const int cp = grid_.shape().cp;
  return collect(
      tensor,
      [&](const ModelLayout::Tensor::Part& part) {
        std::vector<Source> sources;
        const ShardLayout& shards = layout_.shards(tensor.stage, part.tp_rank);
        for (const auto& segment : shards.segments({part.flat.begin, part.flat.end}))
          sources.push_back({grid_.rank_of(segment.shard / cp, tensor.stage, segment.shard % cp, part.tp_rank),
                             segment.place, segment.flat.size()});
        return sources;
      },
      own);
}

const float* TensorCollector::collect(const ModelLayout::Tensor& tensor, const Sources& sources_of, TensorView own) {
  const bool first = grid_.world().rank() == 0;
  if (tensor.parts.size() == 1) {
    const std::vector<Source> sources = sources_of(tensor.parts[0]);
    const bool readable = own.device() == DeviceKind::cpu && own.dtype() == DType::f32;
    if (first && sources.size() == 1 && sources[0].rank == 0 && readable)
      return own.rows(sources[0].place, sources[0].place + sources[0].count).f32();
  }
  if (first) buffer_.resize(static_cast<size_t>(tensor.parts[0].flat.elements()));
  for (const ModelLayout::Tensor::Part& part : tensor.parts) {
    if (first) part_.resize(static_cast<size_t>(part.flat.end - part.flat.begin));
    // Parts of columns lie apart in the whole.
    const bool apart = part.flat.cut.axis == TensorCut::Axis::columns;
    float* into = apart ? part_.data() : buffer_.data();
    if (first && part.flat.cut.axis == TensorCut::Axis::rows)
      part.flat.each_run([&](int64_t, int64_t whole, int64_t) { into += whole; });
    fetch(sources_of(part), own, into);
    if (first && apart) part.flat.put_part(part_.data(), buffer_.data());
  }
  return first ? buffer_.data() : nullptr;
}

void TensorCollector::fetch(const std::vector<Source>& sources, TensorView own, float* into) {
  constexpr int kTag = 11;
  Communicator& world = grid_.world();
  const auto part = [&](const Source& source) { return own.rows(source.place, source.place + source.count); };
  if (world.rank() != 0) {
    for (const Source& source : sources) {
      if (source.rank != world.rank()) continue;
      const HostFloats own_part(part(source));
      world.send_async(own_part.values().data(), source.count * int64_t{sizeof(float)}, 0, kTag).wait();
    }
    return;
  }
  std::vector<CommRequest> requests;
  for (const Source& source : sources) {
    if (source.rank == 0)
      std::ranges::copy(HostFloats(part(source)).values(), into);
    else
      requests.push_back(world.receive_async(into, source.count * int64_t{sizeof(float)}, source.rank, kTag));
    into += source.count;
  }
  for (CommRequest& request : requests) request.wait();
}

}  // namespace sb
