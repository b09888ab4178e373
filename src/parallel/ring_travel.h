#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace sb {

// Ranks in nodes of equal size, node by node. All in one node: a plain ring.
struct RingShape {
  int ranks = 1;
  int node_size = 1;

  RingShape(int ranks, int node_size);
  int nodes() const { return ranks / node_size; }
  // Whose data rank `rank` has in inner step `step` of turn `turn`: a turn goes once around the node; from turn to turn
  // the data of a whole node moves on to the next one.
  int chunk(int rank, int turn, int step) const;
  // Neighbours in the rings: `by` places on, within the node or to the same place of another node.
  int inner(int rank, int by) const;
  int outer(int rank, int by) const;
};

// Brings every rank's data past every rank: each has all chunks in turn, its own first, while the next one is already
// on its way. Between nodes data moves while the ranks of a node pass theirs around, so that a slow link has a whole
// turn's time.
class RingTravel {
 public:
  RingTravel(Communicator& group, int node_size) : group_(group), shape_(group.size(), node_size) {}

  const RingShape& shape() const { return shape_; }

  // floats[c]: how much data rank c brings. `visit` is called once for every chunk.
  using Visit = std::function<void(int chunk, const float* data)>;
  void forward(const float* own, std::span<const int64_t> floats, const Visit& visit);

  // The same tour; `contribute` writes what this rank adds to the gradient of the chunk (floats[chunk] numbers). The
  // sums travel behind the data, in fp32, always added in the order of the tour, and end at their owners.
  using Contribute = std::function<void(int chunk, const float* data, float* gradient)>;
  void backward(const float* own, std::span<const int64_t> floats, const Contribute& contribute, float* own_gradient);

 private:
  CommRequest send(const float* data, int64_t count, int to, int tag) {
    return group_.send_async(data, count * static_cast<int64_t>(sizeof(float)), to, tag);
  }
  CommRequest receive(std::vector<float>& data, int64_t count, int from, int tag) {
    return group_.receive_async(data.data(), count * static_cast<int64_t>(sizeof(float)), from, tag);
  }
  void reserve(int64_t floats, bool gradients);

  Communicator& group_;
  const RingShape shape_;
  std::vector<float> inner_[2], outer_[2];              // data on its way
  std::vector<float> sum_[2], partial_;                 // gradients going around the node
  std::vector<float> node_sum_, arrived_, leaving_[2];  // and between nodes
};

// What a tour takes when a rank's work on a chunk, a transfer within a node and one between nodes take the given times,
// by following every transfer and every step of forward(): the last rank's end.
struct RingTimes {
  double compute, inner_hop, outer_hop;
};
// Ranks are laid out in nodes of `machine_node`; the ring itself is made for nodes of `shape.node_size` (all ranks: a
// plain ring over all machines).
double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times);

}  // namespace sb
