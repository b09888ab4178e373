#pragma once

// A global batch arranged on ranks at will, and the gradients of the whole model put together again.

#include <algorithm>
#include <span>
#include <vector>

#include "parallel/model_layout.h"
#include "parallel/ring/context_batch.h"
#include "tests/model/model_fixture.h"
#include "train/rank_model.h"

namespace sb::test {

// Micro-batches of every data-parallel rank, by the places of their sequences.
using Arrangement = std::vector<std::vector<std::vector<int>>>;

// `chunk` above 0: micro-batches of one longer sequence are cut into pieces of so many tokens. Context-parallel ranks
// share them by blocks of `block`.
inline std::vector<MicroBatch> own_batches(RankModel& model, const Arrangement& arrangement,
                                           const std::vector<std::vector<int32_t>>& sequences, int64_t chunk = 0,
                                           int block = 64) {
  std::vector<MicroBatch> batches;
  for (const std::vector<int>& places : arrangement[static_cast<size_t>(model.grid().dp_rank())]) {
    std::vector<std::vector<int32_t>> members;
    for (const int place : places) members.push_back(sequences[static_cast<size_t>(place)]);
    batches.push_back(pack(members, count_targets(sequences)));
    batches.back().sequence_ids.assign(places.begin(), places.end());
    if (chunk == 0 || places.size() > 1 || batches.back().size() <= chunk) continue;
    const MicroBatch whole = std::move(batches.back());
    batches.pop_back();
    for (int64_t begin = 0; begin < whole.size(); begin += chunk)
      batches.push_back(cut_piece(whole, begin, std::min(begin + chunk, whole.size())));
  }
  const int cp = model.grid().shape().cp;
  for (MicroBatch& batch : batches)
    if (cp > 1)
      batch = context_part(batch, batch_layout(ContextPlacement::triangular, cp, block, batch), model.grid().cp_rank());
  return batches;
}

// What this rank writes of a checkpoint.
inline void add_own_tensors(RankModel& model, Tensors& weights, Tensors& moments) {
  const OwnTensors own = model.own_tensors();
  size_t taken = 0;
  const auto take = [&](const std::vector<SafetensorsTensor>& tensors, Tensors& into) {
    for (const SafetensorsTensor& tensor : tensors) {
      const float* values = own.next(nullptr);
      EXPECT_TRUE(into.emplace(tensor.name, std::vector<float>(values, values + tensor.elements())).second);
      ++taken;
    }
  };
  take(own.tensors.weights, weights);
  take(own.tensors.moments, moments);
  while (taken++ < own.rounds) EXPECT_EQ(own.next(nullptr), nullptr);
}

// After their reduction each rank has the sums of its own pieces: they go to their places in `whole`, by tensor.
inline void add_own_gradients(RankModel& model, const ModelLayout& layout, std::span<const float> gradients,
                              Tensors& whole) {
  for (const ModelLayout::Tensor& tensor : layout.tensors()) {
    std::vector<float>& to = whole[tensor.name];
    to.resize(static_cast<size_t>(tensor.parts[0].flat.elements()));
    if (tensor.stage != model.grid().stage()) continue;
    const int tp_rank = model.grid().tp_rank();
    for (const auto& [rank, flat] : tensor.parts) {
      if (rank != tp_rank) continue;
      const auto segments = layout.shards(tensor.stage, tp_rank).segments({flat.begin, flat.end});
      flat.each_run([&, &flat = flat](int64_t here, int64_t there, int64_t count) {
        for (const auto& segment : segments)
          for (int64_t i = 0; i < count; ++i)
            if (const int64_t at = flat.begin + here + i;
                segment.shard == model.grid().replicas().rank() && segment.flat.begin <= at && at < segment.flat.end)
              to[static_cast<size_t>(there + i)] = gradients[static_cast<size_t>(at)];
      });
    }
  }
}

}  // namespace sb::test
