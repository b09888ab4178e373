#include "parallel/ring_travel.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {
namespace {

enum Tag { kInner, kOuter, kInnerGradient, kOuterGradient };

// The gradient summed so far comes first.
void add_before(const float* sum, float* own, int64_t count) {
  for (int64_t i = 0; i < count; ++i) own[i] = sum[i] + own[i];
}

void at_least(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(floats);
}

}  // namespace

RingShape::RingShape(int ranks_, int node_size_) : ranks(ranks_), node_size(node_size_) {
  SB_USER_CHECK(node_size > 0 && ranks % node_size == 0,
                "a ring of {} ranks does not divide into nodes of {}: choose a node size that divides it", ranks,
                node_size);
}

int RingShape::chunk(int rank, int turn, int step) const {
  return outer(inner(rank, -step), -turn);
}

int RingShape::inner(int rank, int by) const {
  const int node = rank / node_size, place = rank % node_size;
  return node * node_size + ((place + by) % node_size + node_size) % node_size;
}

int RingShape::outer(int rank, int by) const {
  return ((rank + by * node_size) % ranks + ranks) % ranks;
}

void RingTravel::reserve(int64_t floats, bool gradients) {
  for (int i = 0; i < 2; ++i) {
    if (shape_.node_size > 1) at_least(inner_[i], floats);
    if (shape_.nodes() > 1) at_least(outer_[i], floats);
    if (!gradients) continue;
    at_least(sum_[i], floats);
    if (shape_.nodes() > 1) at_least(leaving_[i], floats);
  }
  if (!gradients) return;
  at_least(partial_, floats);
  at_least(node_sum_, floats);
  if (shape_.nodes() > 1) at_least(arrived_, floats);
}

void RingTravel::forward(const float* own, std::span<const int64_t> floats, const Visit& visit) {
  const int rank = group_.rank(), nodes = shape_.nodes(), members = shape_.node_size;
  reserve(*std::max_element(floats.begin(), floats.end()), false);
  const float* entry = own;
  for (int turn = 0; turn < nodes; ++turn) {
    CommRequest outer_in, outer_out;
    if (turn + 1 < nodes) {
      outer_in = receive(outer_[turn % 2], floats[shape_.chunk(rank, turn + 1, 0)], shape_.outer(rank, -1), kOuter);
      outer_out = send(entry, floats[shape_.chunk(rank, turn, 0)], shape_.outer(rank, 1), kOuter);
    }
    const float* data = entry;
    for (int step = 0; step < members; ++step) {
      const int chunk = shape_.chunk(rank, turn, step);
      CommRequest in, out;
      if (step + 1 < members) {
        in = receive(inner_[step % 2], floats[shape_.chunk(rank, turn, step + 1)], shape_.inner(rank, -1), kInner);
        out = send(data, floats[chunk], shape_.inner(rank, 1), kInner);
      }
      visit(chunk, data);
      in.wait();
      out.wait();
      data = inner_[step % 2].data();
    }
    outer_in.wait();
    outer_out.wait();
    entry = outer_[turn % 2].data();
  }
}

void RingTravel::backward(const float* own, std::span<const int64_t> floats, const Contribute& contribute,
                          float* own_gradient) {
  const int rank = group_.rank(), nodes = shape_.nodes(), members = shape_.node_size;
  reserve(*std::max_element(floats.begin(), floats.end()), true);
  const float* entry = own;
  CommRequest leaving[2];
  for (int turn = 0; turn < nodes; ++turn) {
    const int entry_chunk = shape_.chunk(rank, turn, 0);
    CommRequest outer_in, outer_out, arriving;
    if (turn + 1 < nodes) {
      outer_in = receive(outer_[turn % 2], floats[shape_.chunk(rank, turn + 1, 0)], shape_.outer(rank, -1), kOuter);
      outer_out = send(entry, floats[entry_chunk], shape_.outer(rank, 1), kOuter);
    }
    if (turn > 0) arriving = receive(arrived_, floats[entry_chunk], shape_.outer(rank, -1), kOuterGradient);

    const float* data = entry;
    CommRequest sums[2];
    for (int step = 0; step < members; ++step) {
      const int chunk = shape_.chunk(rank, turn, step);
      CommRequest in, out, partial;
      if (step + 1 < members) {
        in = receive(inner_[step % 2], floats[shape_.chunk(rank, turn, step + 1)], shape_.inner(rank, -1), kInner);
        out = send(data, floats[chunk], shape_.inner(rank, 1), kInner);
      }
      if (step > 0) partial = receive(partial_, floats[chunk], shape_.inner(rank, -1), kInnerGradient);
      std::vector<float>& sum = sum_[step % 2];
      sums[step % 2].wait();
      contribute(chunk, data, sum.data());
      partial.wait();
      if (step > 0) add_before(partial_.data(), sum.data(), floats[chunk]);
      if (members > 1) sums[step % 2] = send(sum.data(), floats[chunk], shape_.inner(rank, 1), kInnerGradient);
      in.wait();
      out.wait();
      data = inner_[step % 2].data();
    }
    // Once around: what this rank brought into the node is back.
    if (members > 1)
      receive(node_sum_, floats[entry_chunk], shape_.inner(rank, -1), kInnerGradient).wait();
    else
      std::copy_n(sum_[0].data(), floats[entry_chunk], node_sum_.data());
    for (CommRequest& request : sums) request.wait();
    arriving.wait();
    if (turn > 0) add_before(arrived_.data(), node_sum_.data(), floats[entry_chunk]);
    if (nodes > 1) {
      leaving[turn % 2].wait();
      std::swap(node_sum_, leaving_[turn % 2]);
      leaving[turn % 2] = send(leaving_[turn % 2].data(), floats[entry_chunk], shape_.outer(rank, 1), kOuterGradient);
    }
    outer_in.wait();
    outer_out.wait();
    entry = outer_[turn % 2].data();
  }
  if (nodes > 1) receive(node_sum_, floats[rank], shape_.outer(rank, -1), kOuterGradient).wait();
  for (CommRequest& request : leaving) request.wait();
  std::copy_n(node_sum_.data(), floats[rank], own_gradient);
}

double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times) {
  const int ranks = shape.ranks;
  const auto hop = [&](int from, int to) {
    return from / machine_node == to / machine_node ? times.inner_hop : times.outer_hop;
  };
  std::vector<double> turn_begin(ranks, 0.0);
  for (int turn = 0; turn < shape.nodes(); ++turn) {
    // A transfer begins when both sides are there, and both are free of it when it is over.
    std::vector<double> begin = turn_begin, end(ranks);
    for (int step = 0; step < shape.node_size; ++step) {
      for (int r = 0; r < ranks; ++r) end[r] = begin[r] + times.compute;
      for (int r = 0; r < ranks && step + 1 < shape.node_size; ++r) {
        const int next = shape.inner(r, 1);
        const double over = std::max(begin[r], begin[next]) + hop(r, next);
        end[r] = std::max(end[r], over);
        end[next] = std::max(end[next], over);
      }
      begin = end;
    }
    for (int r = 0; r < ranks && turn + 1 < shape.nodes(); ++r) {
      const int next = shape.outer(r, 1);
      const double over = std::max(turn_begin[r], turn_begin[next]) + hop(r, next);
      end[r] = std::max(end[r], over);
      end[next] = std::max(end[next], over);
    }
    turn_begin = end;
  }
  return *std::max_element(turn_begin.begin(), turn_begin.end());
}

}  // namespace sb
