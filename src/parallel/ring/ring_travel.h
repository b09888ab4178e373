#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/device/device_communicator.h"
#include "core/dtype.h"
#include "device/exec.h"

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

// Keys and values of a chunk, and sums of their gradients.
struct RingData {
  const void *keys, *values;
};
struct RingGradients {
  float *keys, *values;
};

// Brings every rank's keys and values past every rank: each has all chunks in turn, its own first, while the next one
// is already on its way. Between nodes data moves while the ranks of a node pass theirs around, so that a slow link has
// a whole turn's time. Data on its way lies in exec.scratch, in at most two chunks' room for each of the two rings; the
// sums of gradients take as much, and a chunk's for what arrives.
class RingTravel {
 public:
  RingTravel(Communicator& group, int node_size) : group_(group), shape_(group.size(), node_size) {}

  const RingShape& shape() const { return shape_; }
  // The messages of this rank.
  DeviceLines lines() const;

  // elements[c]: how many numbers of type `dtype` the keys of rank c are, and its values. `visit` is called once for
  // every chunk.
  using Visit = std::function<void(int chunk, const RingData& data)>;
  void forward(const Exec& exec, DType dtype, const RingData& own, std::span<const int64_t> elements,
               const Visit& visit);

  // The same tour; `contribute` adds this rank's part to the gradients of the chunk. The sums travel behind the data,
  // in fp32, always added in the order of the tour, and end at their owners, where they are added to `home`.
  using Contribute = std::function<void(int chunk, const RingData& data, const RingGradients& sum)>;
  void backward(const Exec& exec, DType dtype, const RingData& own, std::span<const int64_t> elements,
                const Contribute& contribute, const RingGradients& home);

  // Bytes of exec.scratch that a tour takes when no rank has more elements than this.
  int64_t forward_scratch_bytes(DType dtype, int64_t elements) const;
  int64_t backward_scratch_bytes(DType dtype, int64_t elements) const;

 private:
  struct Transfer {
    CommRequest keys, values;
    void wait() {
      keys.wait();
      values.wait();
    }
  };
  class BackwardTour;
  Transfer send(const void* keys, const void* values, int64_t bytes, int to, int tag);
  Transfer receive(void* keys, void* values, int64_t bytes, int from, int tag);

  Communicator& group_;
  const RingShape shape_;
};

}  // namespace sb
