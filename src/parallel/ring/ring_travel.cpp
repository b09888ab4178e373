#include "parallel/ring/ring_travel.h"

#include <algorithm>
#include <initializer_list>

#include "core/errors.h"
#include "device/memory.h"
#include "parallel/ring/ring_kernels.h"

namespace sb {
namespace {

enum RingTag { kInner, kOuter, kInnerGradient, kOuterGradient };

// Room for one chunk's keys and values, or for sums of their gradients.
struct Buffer {
  char* keys = nullptr;
  char* values = nullptr;

  static int64_t bytes(int64_t piece) { return 2 * Arena::rounded(piece); }
  static Buffer allocate(Arena& arena, int64_t piece) {
    Buffer buffer;
    buffer.keys = static_cast<char*>(arena.allocate_bytes(piece));
    buffer.values = static_cast<char*>(arena.allocate_bytes(piece));
    return buffer;
  }
  RingData data() const { return {keys, values}; }
  RingGradients gradients() const { return {reinterpret_cast<float*>(keys), reinterpret_cast<float*>(values)}; }
};

// As many as are needed for `count` that are used in turns of two.
void allocate(Arena& arena, int64_t piece, int count, Buffer (&buffers)[2]) {
  for (int i = 0; i < std::min(count, 2); ++i) buffers[i] = Buffer::allocate(arena, piece);
}

void clear(const Exec& exec, const RingGradients& sum, int64_t count) {
  for (float* piece : {sum.keys, sum.values}) zero_tensor(exec, TensorView(piece, DType::f32, {count}, exec.device));
}

void add(const Exec& exec, const RingGradients& more, const RingGradients& sum, int64_t count) {
  if (exec.device == DeviceKind::cuda) {
    gpu::add_floats(exec, more.keys, sum.keys, count);
    return gpu::add_floats(exec, more.values, sum.values, count);
  }
  for (const auto& [from, to] : {std::pair(more.keys, sum.keys), std::pair(more.values, sum.values)})
    // Named anew: clang before 16 captures no structured bindings.
    exec.pool->parallel_slices(count, [from = from, to = to](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) to[i] += from[i];
    });
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

DeviceLines RingTravel::lines() const {
  DeviceLines lines;
  const int rank = group_.rank();
  const auto add = [&](int next, int previous, std::initializer_list<int> tags) {
    for (const int tag : tags) {
      lines.to.push_back({next, tag});
      lines.from.push_back({previous, tag});
    }
  };
  if (shape_.node_size > 1) add(shape_.inner(rank, 1), shape_.inner(rank, -1), {kInner, kInnerGradient});
  if (shape_.nodes() > 1) add(shape_.outer(rank, 1), shape_.outer(rank, -1), {kOuter, kOuterGradient});
  return lines;
}

RingTravel::Transfer RingTravel::send(const void* keys, const void* values, int64_t bytes, int to, int tag) {
  Transfer transfer;
  transfer.keys = group_.send_async(keys, bytes, to, tag);
  transfer.values = group_.send_async(values, bytes, to, tag);
  return transfer;
}

RingTravel::Transfer RingTravel::receive(void* keys, void* values, int64_t bytes, int from, int tag) {
  Transfer transfer;
  transfer.keys = group_.receive_async(keys, bytes, from, tag);
  transfer.values = group_.receive_async(values, bytes, from, tag);
  return transfer;
}

int64_t RingTravel::forward_scratch_bytes(DType dtype, int64_t elements) const {
  return (std::min(shape_.node_size - 1, 2) + std::min(shape_.nodes() - 1, 2)) *
         Buffer::bytes(elements * dtype_bytes(dtype));
}

int64_t RingTravel::backward_scratch_bytes(DType dtype, int64_t elements) const {
  const auto sums = [](int others) { return others == 0 ? 0 : 1 + std::min(others, 2); };
  return forward_scratch_bytes(dtype, elements) +
         (sums(shape_.node_size - 1) + sums(shape_.nodes() - 1)) * Buffer::bytes(elements * dtype_bytes(DType::f32));
}

void RingTravel::forward(const Exec& exec, DType dtype, const RingData& own, std::span<const int64_t> elements,
                         const Visit& visit) {
  const int rank = group_.rank(), nodes = shape_.nodes(), members = shape_.node_size;
  const ArenaScope scope(*exec.scratch);
  const int64_t piece = *std::max_element(elements.begin(), elements.end()) * dtype_bytes(dtype);
  const auto bytes = [&](int turn, int step) { return elements[shape_.chunk(rank, turn, step)] * dtype_bytes(dtype); };
  Buffer inner[2], outer[2];
  allocate(*exec.scratch, piece, members - 1, inner);
  allocate(*exec.scratch, piece, nodes - 1, outer);

  RingData entry = own;
  for (int turn = 0; turn < nodes; ++turn) {
    Transfer outer_in, outer_out;
    if (turn + 1 < nodes) {
      const Buffer& next = outer[turn % 2];
      outer_in = receive(next.keys, next.values, bytes(turn + 1, 0), shape_.outer(rank, -1), kOuter);
      outer_out = send(entry.keys, entry.values, bytes(turn, 0), shape_.outer(rank, 1), kOuter);
    }
    RingData data = entry;
    for (int step = 0; step < members; ++step) {
      Transfer in, out;
      if (step + 1 < members) {
        const Buffer& next = inner[step % 2];
        in = receive(next.keys, next.values, bytes(turn, step + 1), shape_.inner(rank, -1), kInner);
        out = send(data.keys, data.values, bytes(turn, step), shape_.inner(rank, 1), kInner);
      }
      visit(shape_.chunk(rank, turn, step), data);
      in.wait();
      out.wait();
      data = inner[step % 2].data();
    }
    outer_in.wait();
    outer_out.wait();
    entry = outer[turn % 2].data();
  }
}

// What this rank adds to the chunk it brought into its node stays in place, at home or (of another node's chunk) in
// `leaving`; the sums of the others go around the node and are added there at the end of the turn. Between nodes alike.
class RingTravel::BackwardTour {
 public:
  // Its room lies in exec.scratch.
  BackwardTour(RingTravel& travel, const Exec& exec, DType dtype, std::span<const int64_t> elements,
               const Contribute& contribute)
      : travel_(travel),
        shape_(travel.shape_),
        exec_(exec),
        dtype_(dtype),
        elements_(elements),
        contribute_(contribute),
        rank_(travel.group_.rank()) {
    const int others = shape_.node_size - 1, other_nodes = shape_.nodes() - 1;
    const int64_t most = *std::max_element(elements.begin(), elements.end());
    const int64_t piece = most * dtype_bytes(dtype), sum_piece = most * static_cast<int64_t>(sizeof(float));
    allocate(*exec.scratch, piece, others, inner_);
    allocate(*exec.scratch, piece, other_nodes, outer_);
    allocate(*exec.scratch, sum_piece, others, sum_);
    allocate(*exec.scratch, sum_piece, other_nodes, leaving_);
    if (others > 0) partial_ = Buffer::allocate(*exec.scratch, sum_piece);
    if (other_nodes > 0) arrived_ = Buffer::allocate(*exec.scratch, sum_piece);
  }

  void run(const RingData& own, const RingGradients& home) {
    RingData entry = own;
    Transfer left[2];
    for (int turn = 0; turn < shape_.nodes(); ++turn) {
      Transfer in, out, arriving;
      if (turn + 1 < shape_.nodes()) {
        in = receive_data(outer_[turn % 2], turn + 1, 0, shape_.outer(rank_, -1), kOuter);
        out = send_data(entry, turn, 0, shape_.outer(rank_, 1), kOuter);
      }
      if (turn > 1) arriving = receive_sum(arrived_, turn, 0, shape_.outer(rank_, -1), kOuterGradient);
      RingGradients node_sum = home;
      if (turn > 0) {
        left[turn % 2].wait();
        node_sum = leaving_[(turn - 1) % 2].gradients();
        clear(exec_, node_sum, count(turn, 0));
      }
      go_around_node(turn, entry, node_sum);
      if (turn > 0) {
        arriving.wait();
        if (turn > 1) add(exec_, arrived_.gradients(), node_sum, count(turn, 0));
        left[turn % 2] = send_sum(node_sum, turn, 0, shape_.outer(rank_, 1), kOuterGradient);
      }
      in.wait();
      out.wait();
      entry = outer_[turn % 2].data();
    }
    if (shape_.nodes() > 1) {
      receive_sum(arrived_, 0, 0, shape_.outer(rank_, -1), kOuterGradient).wait();
      add(exec_, arrived_.gradients(), home, count(0, 0));
    }
    for (Transfer& transfer : left) transfer.wait();
  }

 private:
  // One turn, from the chunk that this rank brought into the node, whose gradients end in `node_sum`.
  void go_around_node(int turn, const RingData& entry, const RingGradients& node_sum) {
    RingData data = entry;
    Transfer sent[2];
    for (int step = 0; step < shape_.node_size; ++step) {
      Transfer in, out;
      if (step + 1 < shape_.node_size) {
        in = receive_data(inner_[step % 2], turn, step + 1, shape_.inner(rank_, -1), kInner);
        out = send_data(data, turn, step, shape_.inner(rank_, 1), kInner);
      }
      if (step == 0)
        contribute_(shape_.chunk(rank_, turn, 0), data, node_sum);
      else
        add_and_send(turn, step, data, sent[step % 2]);
      in.wait();
      out.wait();
      data = inner_[step % 2].data();
    }
    // Once around: what the others of the node added to the chunk that this rank brought is back.
    if (shape_.node_size > 1) {
      receive_sum(partial_, turn, 0, shape_.inner(rank_, -1), kInnerGradient).wait();
      add(exec_, partial_.gradients(), node_sum, count(turn, 0));
    }
    for (Transfer& transfer : sent) transfer.wait();
  }

  // This rank's part of a chunk that another of the node brought, with the sum of those before it in the tour, which is
  // received meanwhile. `sent`: the sum sent two steps ago, whose room is used again.
  void add_and_send(int turn, int step, const RingData& data, Transfer& sent) {
    Transfer partial_in;
    if (step > 1) partial_in = receive_sum(partial_, turn, step, shape_.inner(rank_, -1), kInnerGradient);
    const RingGradients own_sum = sum_[(step - 1) % 2].gradients();
    sent.wait();
    clear(exec_, own_sum, count(turn, step));
    contribute_(shape_.chunk(rank_, turn, step), data, own_sum);
    partial_in.wait();
    if (step > 1) add(exec_, partial_.gradients(), own_sum, count(turn, step));
    sent = send_sum(own_sum, turn, step, shape_.inner(rank_, 1), kInnerGradient);
  }

  int64_t count(int turn, int step) const { return elements_[shape_.chunk(rank_, turn, step)]; }
  int64_t bytes(int turn, int step) const { return count(turn, step) * dtype_bytes(dtype_); }
  int64_t sum_bytes(int turn, int step) const { return count(turn, step) * static_cast<int64_t>(sizeof(float)); }

  // Of the chunk that this rank has in that step.
  Transfer receive_data(const Buffer& to, int turn, int step, int from, int tag) {
    return travel_.receive(to.keys, to.values, bytes(turn, step), from, tag);
  }
  Transfer send_data(const RingData& data, int turn, int step, int to, int tag) {
    return travel_.send(data.keys, data.values, bytes(turn, step), to, tag);
  }
  Transfer receive_sum(const Buffer& to, int turn, int step, int from, int tag) {
    return travel_.receive(to.keys, to.values, sum_bytes(turn, step), from, tag);
  }
  Transfer send_sum(const RingGradients& sum, int turn, int step, int to, int tag) {
    return travel_.send(sum.keys, sum.values, sum_bytes(turn, step), to, tag);
  }

  RingTravel& travel_;
  const RingShape& shape_;
  const Exec& exec_;
  const DType dtype_;
  const std::span<const int64_t> elements_;
  const Contribute& contribute_;
  const int rank_;
  Buffer inner_[2], outer_[2];  // keys and values on their way, in the node and between nodes
  Buffer sum_[2], leaving_[2];  // sums of this rank on their way, likewise
  Buffer partial_, arrived_;    // sums that come in, likewise
};

void RingTravel::backward(const Exec& exec, DType dtype, const RingData& own, std::span<const int64_t> elements,
                          const Contribute& contribute, const RingGradients& home) {
  const ArenaScope scope(*exec.scratch);
  BackwardTour(*this, exec, dtype, elements, contribute).run(own, home);
}

}  // namespace sb
