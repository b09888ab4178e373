#include "parallel/tensor_collector.h"

#include <algorithm>
#include <list>

#include "device/host_floats.h"

namespace sb {
namespace {

constexpr int kTag = 11;

}  // namespace

const float* TensorCollector::collect(std::span<const Wanted> round, float* into) {
  Communicator& world = grid_.world();
  const Wanted* mine = nullptr;
  // What is sent stays until it is, while the own tensor comes: nobody waits for a rank that waits, too.
  std::list<HostFloats> sent;
  std::vector<CommRequest> sending;
  for (const Wanted& wanted : round) {
    if (wanted.to == world.rank()) {
      mine = &wanted;
      continue;
    }
    for (const ModelLayout::Tensor::Part& part : wanted.tensor->parts) {
      for (const Source& source : sources_of(wanted, part)) {
        if (source.rank != world.rank()) continue;
        const HostFloats& own = sent.emplace_back(wanted.own.rows(source.place, source.place + source.count));
        sending.push_back(
            world.send_async(own.values().data(), source.count * int64_t{sizeof(float)}, wanted.to, kTag));
      }
    }
  }
  const float* values = mine != nullptr ? receive(*mine, into) : nullptr;
  for (CommRequest& request : sending) request.wait();
  return values;
}

std::vector<TensorCollector::Source> TensorCollector::sources_of(const Wanted& wanted,
                                                                 const ModelLayout::Tensor::Part& part) const {
  const int stage = wanted.tensor->stage;
  if (!wanted.sharded) {
    // The receiver's own copy, where it has the stage: then nothing but what others have of it travels.
    const GridPlace to = grid_place(grid_.shape(), wanted.to);
    const int dp = to.stage == stage ? to.dp : 0, cp = to.stage == stage ? to.cp : 0;
    return {{grid_.rank_of(dp, stage, cp, part.tp_rank), part.flat.begin, part.flat.end - part.flat.begin}};
  }
  std::vector<Source> sources;
  const int cp = grid_.shape().cp;
  for (const auto& segment : layout_.shards(stage, part.tp_rank).segments({part.flat.begin, part.flat.end}))
    sources.push_back({grid_.rank_of(segment.shard / cp, stage, segment.shard % cp, part.tp_rank), segment.place,
                       segment.flat.size()});
  return sources;
}

const float* TensorCollector::receive(const Wanted& wanted, float* into) {
  const ModelLayout::Tensor& tensor = *wanted.tensor;
  if (into == nullptr) {
    const std::vector<Source> sources = sources_of(wanted, tensor.parts[0]);
    const bool readable = wanted.own.device() == DeviceKind::cpu && wanted.own.dtype() == DType::f32;
    if (readable && tensor.parts.size() == 1 && sources.size() == 1 && sources[0].rank == wanted.to)
      return wanted.own.rows(sources[0].place, sources[0].place + sources[0].count).f32();
    buffer_.resize(static_cast<size_t>(tensor.parts[0].flat.elements()));
    into = buffer_.data();
  }
  for (const ModelLayout::Tensor::Part& part : tensor.parts) {
    // Parts of columns lie apart in the whole.
    if (part.flat.cut.axis == TensorCut::Axis::columns) {
      part_.resize(static_cast<size_t>(part.flat.end - part.flat.begin));
      receive_part(wanted, part, part_.data());
      part.flat.put_part(part_.data(), into);
      continue;
    }
    float* place = into;
    part.flat.each_run([&](int64_t, int64_t whole, int64_t) { place += whole; });
    receive_part(wanted, part, place);
  }
  return into;
}

void TensorCollector::receive_part(const Wanted& wanted, const ModelLayout::Tensor::Part& part, float* into) {
  std::vector<CommRequest> requests;
  for (const Source& source : sources_of(wanted, part)) {
    if (source.rank == wanted.to)
      std::ranges::copy(HostFloats(wanted.own.rows(source.place, source.place + source.count)).values(), into);
    else
      requests.push_back(grid_.world().receive_async(into, source.count * int64_t{sizeof(float)}, source.rank, kTag));
    into += source.count;
  }
  for (CommRequest& request : requests) request.wait();
}

}  // namespace sb
