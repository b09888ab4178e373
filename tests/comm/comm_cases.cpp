#include "tests/comm/comm_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <thread>
#include <vector>

#include "device/float16.h"

namespace sb {
namespace {

using std::chrono::milliseconds;

// What rank r brings at position i: small integers for integer types, numbers whose sum depends on the order for
// floating point ones.
template <typename T>
T brought(int rank, int64_t i) {
  const int64_t mixed = (i * 2654435761 + rank * 40503 + 17) % 1000003;
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(std::ldexp(static_cast<double>(mixed) / 1000003.0 - 0.4, static_cast<int>(mixed % 23)));
  else
    return static_cast<T>(mixed % 29);
}

template <typename T>
T combined(int ranks, int64_t i, ReduceOp op) {
  T result = brought<T>(0, i);
  for (int r = 1; r < ranks; ++r) {
    const T other = brought<T>(r, i);
    if (op == ReduceOp::sum) result = static_cast<T>(result + other);
    if (op == ReduceOp::max) result = std::max(result, other);
    if (op == ReduceOp::min) result = std::min(result, other);
  }
  return result;
}

constexpr int64_t kCounts[] = {0, 1, 2, 7, 1000, 20011};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min};

template <typename T>
std::vector<T> brought_by(int rank, int64_t count) {
  std::vector<T> data(count);
  for (int64_t i = 0; i < count; ++i) data[i] = brought<T>(rank, i);
  return data;
}

// Bit by bit: the order of the ranks decides the rounding.
template <typename T>
int64_t wrong_reductions(const T* data, int64_t count, int64_t first, int ranks, ReduceOp op) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong += data[i] != combined<T>(ranks, first + i, op);
  return wrong;
}

template <typename T>
void all_reduce_of(Communicator& world) {
  for (const int64_t count : kCounts)
    for (const ReduceOp op : kOps) {
      std::vector<T> data = brought_by<T>(world.rank(), count);
      world.all_reduce(std::span<T>(data), op);
      EXPECT_EQ(wrong_reductions(data.data(), count, 0, world.size(), op), 0)
          << "count " << count << " op " << int(op) << " rank " << world.rank();
    }
}

void all_reduce(Communicator& world) {
  all_reduce_of<uint8_t>(world);
  all_reduce_of<int32_t>(world);
  all_reduce_of<int64_t>(world);
  all_reduce_of<float>(world);
  all_reduce_of<double>(world);
  EXPECT_EQ(world.all_reduce<int64_t>(world.rank() + 1), int64_t{world.size()} * (world.size() + 1) / 2);
  EXPECT_EQ(world.all_reduce(world.rank(), ReduceOp::max), world.size() - 1);
}

// Enough for several rounds of the implementations that work in pieces.
void all_reduce_large(Communicator& world) {
  const int64_t count = 400'003;
  std::vector<float> data = brought_by<float>(world.rank(), count);
  world.all_reduce(std::span<float>(data));
  EXPECT_EQ(wrong_reductions(data.data(), count, 0, world.size(), ReduceOp::sum), 0);
}

template <typename T>
void reduce_scatter_of(Communicator& world, std::span<const int64_t> counts) {
  for (const int64_t count : counts)
    for (const ReduceOp op : kOps) {
      std::vector<T> data = brought_by<T>(world.rank(), count * world.size());
      world.reduce_scatter(std::span<T>(data), count, op);
      const int64_t first = count * world.rank();
      EXPECT_EQ(wrong_reductions(data.data() + first, count, first, world.size(), op), 0)
          << "count " << count << " op " << int(op) << " rank " << world.rank();
    }
}

void reduce_scatter(Communicator& world) {
  reduce_scatter_of<float>(world, kCounts);
  reduce_scatter_of<double>(world, kCounts);
  reduce_scatter_of<int32_t>(world, kCounts);
  const int64_t large[] = {300'001};
  reduce_scatter_of<float>(world, large);
}

// Activations of ranks that share products. Small whole numbers: their sums are exact, in whatever order.
void bf16(Communicator& world) {
  const auto bits_of = [](int rank, int64_t count) {
    std::vector<uint16_t> data;
    for (const int32_t value : brought_by<int32_t>(rank, count))
      data.push_back(bf16_from_f32(static_cast<float>(value)));
    return data;
  };
  const auto wrong = [&](const uint16_t* data, int64_t count, int64_t first, ReduceOp op) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i)
      sum += f32_from_bf16(data[i]) != static_cast<float>(combined<int32_t>(world.size(), first + i, op));
    return sum;
  };
  for (const int64_t count : kCounts)
    for (const ReduceOp op : kOps) {
      std::vector<uint16_t> data = bits_of(world.rank(), count);
      world.all_reduce_async(data.data(), count, CommType::bf16, op).wait();
      EXPECT_EQ(wrong(data.data(), count, 0, op), 0) << "all_reduce of " << count << " op " << int(op);
      data = bits_of(world.rank(), count * world.size());
      world.reduce_scatter_async(data.data(), count, CommType::bf16, op).wait();
      const int64_t first = count * world.rank();
      EXPECT_EQ(wrong(data.data() + first, count, first, op), 0) << "reduce_scatter of " << count << " op " << int(op);
    }
}

void all_gather(Communicator& world) {
  for (const int64_t count : kCounts) {
    std::vector<int64_t> data(count * world.size(), -1);
    for (int64_t i = 0; i < count; ++i) data[count * world.rank() + i] = brought<int64_t>(world.rank(), i);
    world.all_gather(std::span<int64_t>(data), count);
    int64_t wrong = 0;
    for (int r = 0; r < world.size(); ++r)
      for (int64_t i = 0; i < count; ++i) wrong += data[count * r + i] != brought<int64_t>(r, i);
    EXPECT_EQ(wrong, 0) << "count " << count << " rank " << world.rank();
  }
}

void broadcast(Communicator& world) {
  for (const int64_t count : kCounts)
    for (int root = 0; root < world.size(); ++root) {
      std::vector<double> data = brought_by<double>(world.rank(), count);
      world.broadcast(std::span<double>(data), root);
      EXPECT_EQ(data, brought_by<double>(root, count)) << "count " << count << " root " << root;
    }
}

// Nobody leaves before the last has come, by the clock that the ranks of a machine share.
void barrier(Communicator& world) {
  const auto now = [] { return static_cast<int64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); };
  for (int late = 0; late < world.size(); ++late) {
    if (world.rank() == late) std::this_thread::sleep_for(milliseconds(60));
    const int64_t came = now();
    world.barrier();
    const int64_t left = now();
    EXPECT_GE(left, world.all_reduce(came, ReduceOp::max)) << "left before rank " << late << " came";
  }
}

// Every rank sends to every rank, itself too; several tags, asked for in another order than sent; empty ones as well.
void messages(Communicator& world) {
  constexpr int64_t kSizes[] = {0, 1, 5, 100'000, 700'001};
  const auto content = [](int from, int to, int tag, int64_t i) {
    return static_cast<uint8_t>(from * 31 + to * 7 + tag * 3 + i % 251);
  };
  std::deque<std::vector<uint8_t>> outgoing, incoming;
  std::vector<CommRequest> requests;
  for (int tag = 4; tag >= 0; --tag)
    for (int from = 0; from < world.size(); ++from) {
      incoming.emplace_back(kSizes[tag]);
      requests.push_back(world.receive_async(incoming.back().data(), kSizes[tag], from, tag));
    }
  for (int tag = 0; tag < 5; ++tag)
    for (int to = 0; to < world.size(); ++to) {
      outgoing.emplace_back(kSizes[tag]);
      for (int64_t i = 0; i < kSizes[tag]; ++i) outgoing.back()[i] = content(world.rank(), to, tag, i);
      requests.push_back(world.send_async(outgoing.back().data(), kSizes[tag], to, tag));
    }
  for (CommRequest& request : requests) request.wait();
  int64_t wrong = 0;
  auto data = incoming.begin();
  for (int tag = 4; tag >= 0; --tag)
    for (int from = 0; from < world.size(); ++from, ++data)
      for (int64_t i = 0; i < kSizes[tag]; ++i) wrong += (*data)[i] != content(from, world.rank(), tag, i);
  EXPECT_EQ(wrong, 0);
}

void messages_keep_their_order(Communicator& world) {
  const int next = (world.rank() + 1) % world.size(), previous = (world.rank() + world.size() - 1) % world.size();
  constexpr int kMessages = 300;
  std::vector<int> sent(kMessages), got(kMessages, -1);
  std::vector<CommRequest> requests;
  for (int i = 0; i < kMessages; ++i) {
    sent[i] = world.rank() * 1000 + i;
    requests.push_back(world.send_async(&sent[i], sizeof(int), next, 1));
  }
  for (int i = 0; i < kMessages; ++i) requests.push_back(world.receive_async(&got[i], sizeof(int), previous, 1));
  for (CommRequest& request : requests) request.wait();
  for (int i = 0; i < kMessages; ++i) ASSERT_EQ(got[i], previous * 1000 + i);
}

// Collectives and messages of two groups, all under way at once, waited for from the last to the first.
void many_at_once(Communicator& world) {
  const std::unique_ptr<Communicator> other = world.split(0, -world.rank(), "reversed");
  constexpr int kEach = 40;
  const int next = (world.rank() + 1) % world.size(), previous = (world.rank() + world.size() - 1) % world.size();
  std::vector<std::vector<float>> sums, gathered;
  std::vector<std::vector<int64_t>> out, in;
  for (int k = 0; k < kEach; ++k) {
    sums.push_back(brought_by<float>(world.rank(), 1 + k * 997));
    gathered.emplace_back(world.size() * (k + 1), float(other->rank() + k));
    out.push_back(brought_by<int64_t>(world.rank() + k, 50 * k));
    in.emplace_back(50 * k);
  }
  std::vector<CommRequest> requests;
  for (int k = 0; k < kEach; ++k) {
    requests.push_back(world.receive_async(in[k].data(), in[k].size() * sizeof(int64_t), previous, k));
    requests.push_back(world.all_reduce_async(sums[k].data(), sums[k].size(), CommType::f32, ReduceOp::sum));
    requests.push_back(other->all_gather_async(gathered[k].data(), k + 1, CommType::f32));
    requests.push_back(world.send_async(out[k].data(), out[k].size() * sizeof(int64_t), next, k));
  }
  while (!requests.empty()) {
    requests.back().wait();
    requests.pop_back();
  }
  for (int k = 0; k < kEach; ++k) {
    EXPECT_EQ(wrong_reductions(sums[k].data(), sums[k].size(), 0, world.size(), ReduceOp::sum), 0) << k;
    EXPECT_EQ(in[k], brought_by<int64_t>(previous + k, 50 * k));
    for (int r = 0; r < world.size(); ++r) ASSERT_EQ(gathered[k][r * (k + 1) + k], float(r + k));
  }
}

void polling_finishes(Communicator& world) {
  std::vector<float> data = brought_by<float>(world.rank(), 100'003);
  CommRequest request = world.all_reduce_async(data.data(), data.size(), CommType::f32, ReduceOp::sum);
  while (!request.done()) std::this_thread::sleep_for(milliseconds(1));
  request.wait();
  EXPECT_TRUE(request.done());
  EXPECT_EQ(wrong_reductions(data.data(), data.size(), 0, world.size(), ReduceOp::sum), 0);
  EXPECT_TRUE(CommRequest().done());
}

void dropped_request_is_waited_for(Communicator& world) {
  std::vector<float> data = brought_by<float>(world.rank(), 10'007);
  if (world.rank() == 0) std::this_thread::sleep_for(milliseconds(30));
  { CommRequest dropped = world.all_reduce_async(data.data(), data.size(), CommType::f32, ReduceOp::sum); }
  EXPECT_EQ(wrong_reductions(data.data(), data.size(), 0, world.size(), ReduceOp::sum), 0);
}

void split(Communicator& world) {
  const int half = world.rank() % 2;
  const auto parity = world.split(half, world.rank(), half ? "odd" : "even");
  ASSERT_NE(parity, nullptr);
  EXPECT_EQ(parity->name(), half ? "odd" : "even");
  EXPECT_EQ(parity->size(), (world.size() + 1 - half) / 2);
  EXPECT_EQ(parity->rank(), world.rank() / 2);
  EXPECT_EQ(parity->timeout(), world.timeout());
  int expected = 0;
  for (int r = half; r < world.size(); r += 2) expected += r;
  EXPECT_EQ(parity->all_reduce(world.rank()), expected);

  const auto reversed = world.split(7, -world.rank(), "reversed");
  EXPECT_EQ(reversed->rank(), world.size() - 1 - world.rank());
  std::vector<int> order(world.size());
  order[reversed->rank()] = world.rank();
  reversed->all_gather(std::span<int>(order), 1);
  for (int r = 0; r < world.size(); ++r) EXPECT_EQ(order[r], world.size() - 1 - r);

  // Equal keys keep the old order; a negative color is in none.
  const auto others = world.split(world.rank() == 0 ? -1 : 0, 3, "others");
  EXPECT_EQ(others == nullptr, world.rank() == 0);
  if (others) {
    EXPECT_EQ(others->rank(), world.rank() - 1);
    EXPECT_EQ(others->all_reduce(1), world.size() - 1);
    const auto inner = others->split(others->rank() / 2, 0, "inner");  // a group of a group
    EXPECT_EQ(inner->all_reduce(world.rank(), ReduceOp::min), 1 + others->rank() / 2 * 2);
  }
  world.barrier();
}

// A group's message does not end up in another group, nor in a collective of its own.
void groups_are_apart(Communicator& world) {
  if (world.size() < 2) return;
  const auto left = world.split(0, 0, "left"), right = world.split(0, 0, "right");
  if (world.rank() == 0) {
    int one = 1, two = 2, three = 3;
    CommRequest a = left->send_async(&one, sizeof one, 1, 9);
    CommRequest b = right->send_async(&two, sizeof two, 1, 9);
    CommRequest c = world.send_async(&three, sizeof three, 1, 9);
    EXPECT_EQ(world.all_reduce(1), world.size());
    a.wait(), b.wait(), c.wait();
  } else if (world.rank() == 1) {
    int one = 0, two = 0, three = 0;
    CommRequest c = world.receive_async(&three, sizeof three, 0, 9);
    CommRequest b = right->receive_async(&two, sizeof two, 0, 9);
    EXPECT_EQ(world.all_reduce(1), world.size());
    b.wait(), c.wait();
    left->receive_async(&one, sizeof one, 0, 9).wait();
    EXPECT_EQ(one, 1);
    EXPECT_EQ(two, 2);
    EXPECT_EQ(three, 3);
  } else {
    EXPECT_EQ(world.all_reduce(1), world.size());
  }
}

// What is asked for early may be sent after a barrier.
void barrier_leaves_messages_alone(Communicator& world) {
  const int from = (world.rank() + world.size() - 1) % world.size(), to = (world.rank() + 1) % world.size();
  int got = -1, given = world.rank();
  CommRequest receive = world.receive_async(&got, sizeof got, from, 1);
  world.barrier();
  world.barrier();
  CommRequest send = world.send_async(&given, sizeof given, to, 1);
  receive.wait();
  send.wait();
  EXPECT_EQ(got, from);
}

constexpr CommCase kCases[] = {{"all_reduce", all_reduce},
                               {"all_reduce_large", all_reduce_large},
                               {"reduce_scatter", reduce_scatter},
                               {"bf16", bf16},
                               {"all_gather", all_gather},
                               {"broadcast", broadcast},
                               {"barrier", barrier},
                               {"barrier_leaves_messages_alone", barrier_leaves_messages_alone},
                               {"messages", messages},
                               {"messages_keep_their_order", messages_keep_their_order},
                               {"many_at_once", many_at_once},
                               {"polling_finishes", polling_finishes},
                               {"dropped_request_is_waited_for", dropped_request_is_waited_for},
                               {"split", split},
                               {"groups_are_apart", groups_are_apart}};

}  // namespace

std::span<const CommCase> comm_cases() {
  return kCases;
}

}  // namespace sb
