#include "parallel/tensor_collector.h"

#include <cstring>

#include "device/memory.h"

namespace sb {

const float* TensorCollector::replicated(const ModelLayout::Tensor& tensor, TensorView own) {
  return collect({{grid_.rank_of(0, tensor.stage, 0), tensor.flat.begin, tensor.flat.end - tensor.flat.begin}}, own);
}

const float* TensorCollector::sharded(const ModelLayout::Tensor& tensor, TensorView own) {
  std::vector<Source> sources;
  const int cp = grid_.shape().cp;
  for (const auto& segment : layout_.shards(tensor.stage).segments({tensor.flat.begin, tensor.flat.end}))
    sources.push_back(
        {grid_.rank_of(segment.shard / cp, tensor.stage, segment.shard % cp), segment.place, segment.flat.size()});
  return collect(sources, own);
}

const float* TensorCollector::collect(const std::vector<Source>& sources, TensorView own) {
  constexpr int kTag = 11;
  Communicator& world = grid_.world();
  const auto part = [&](const Source& source) { return own.rows(source.place, source.place + source.count); };
  if (world.rank() != 0) {
    for (const Source& source : sources)
      if (source.rank == world.rank())
        world.send_async(HostCopy(part(source)).view().raw(), source.count * int64_t{sizeof(float)}, 0, kTag).wait();
    return nullptr;
  }
  if (sources.size() == 1 && sources[0].rank == 0 && own.device() == DeviceKind::cpu) return part(sources[0]).f32();
  int64_t total = 0;
  for (const Source& source : sources) total += source.count;
  buffer_.resize(static_cast<size_t>(total));
  std::vector<CommRequest> requests;
  float* into = buffer_.data();
  for (const Source& source : sources) {
    const int64_t bytes = source.count * int64_t{sizeof(float)};
    if (source.rank == 0)
      std::memcpy(into, HostCopy(part(source)).view().raw(), static_cast<size_t>(bytes));
    else
      requests.push_back(world.receive_async(into, bytes, source.rank, kTag));
    into += source.count;
  }
  for (CommRequest& request : requests) request.wait();
  return buffer_.data();
}

}  // namespace sb
