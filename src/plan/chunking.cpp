#include "plan/chunking.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"
#include "plan/schedule/ordering.h"
#include "plan/tuning/tuning.h"

namespace sb {
namespace {

constexpr int64_t kSizes[] = {4096, 2048, 8192, 16384};  // the likeliest first
constexpr double kNever = std::numeric_limits<double>::infinity();

// A micro-batch of one rank: a piece of a sequence, or a pack of short ones.
struct Unit {
  int first = 0, count = 0;  // of the members
  Piece piece;
};

// The pieces of a sequence are a group, and so is a pack by itself.
struct Groups {
  std::vector<int> members;      // sequences of all units
  std::vector<Unit> units;       // group by group
  std::vector<int> begin{0};     // first unit of every group, and one past the last
  size_t packs = 0, packed = 0;  // packs of short sequences, and how many these hold
  int count() const { return static_cast<int>(begin.size()) - 1; }
  int size(int group) const { return begin[static_cast<size_t>(group) + 1] - begin[static_cast<size_t>(group)]; }
  int first_member(int group) const {
    return members[static_cast<size_t>(units[static_cast<size_t>(begin[static_cast<size_t>(group)])].first)];
  }
  void end_group() { begin.push_back(static_cast<int>(units.size())); }
};

// A rank as it would run.
struct Arrangement {
  std::vector<int> members;
  std::vector<Unit> units;  // in the order of their forwards
  int ahead = 1;
  double makespan = kNever;
  int64_t chunk = 0;  // by which it is cut
  size_t packs = 0;   // of its short sequences
};

class RankChunks {
 public:
  RankChunks(const CostModel& cost, std::span<const Sequence> sequences, std::span<const int32_t> budgets,
             const BatchingOptions& batching, const ChunkOptions& options, std::vector<int> members)
      : cost_(cost),
        sequences_(sequences),
        budgets_(budgets),
        batching_(batching),
        options_(options),
        members_(std::move(members)) {}

  const Arrangement& best() const { return best_; }

  // Keeps the arrangement by this size if it is the fastest so far. `all_orders`: of several orders, where they may be
  // chosen, otherwise of the likeliest.
  void attempt(int64_t chunk, bool all_orders = false) {
    if (all_orders) return attempt(make_groups(chunk, best_.chunk == chunk ? best_.packs : 0), chunk, true);
    Groups groups = make_groups(chunk, 0);
    attempt(groups, chunk, false);
    // The fewest packs are the largest: where no other size is tried, more of them may fill the pipeline better.
    constexpr size_t kPacksOfStage = 16;
    const size_t enough = kPacksOfStage * static_cast<size_t>(cost_.stages());
    while (!options_.automatic() && cost_.stages() > 1 && groups.packs < std::min(groups.packed, enough)) {
      groups = make_groups(chunk, 2 * groups.packs);
      attempt(groups, chunk, false);
    }
  }

  // As one more rank.
  static void append(std::span<const int> members, std::span<const Unit> units, int ahead, Batches& batches) {
    for (const Unit& unit : units) {
      const auto own = members.subspan(static_cast<size_t>(unit.first), static_cast<size_t>(unit.count));
      batches.sequences.insert(batches.sequences.end(), own.begin(), own.end());
      batches.micro_batch_begin.push_back(static_cast<int>(batches.sequences.size()));
      batches.pieces.push_back(unit.piece);
    }
    batches.rank_begin.push_back(batches.micro_batches());
    batches.ahead.push_back(ahead);
  }

 private:
  void attempt(const Groups& groups, int64_t chunk, bool all_orders) {
    int longest = 0;
    for (int g = 0; g < groups.count(); ++g) longest = std::max(longest, groups.size(g));
    Batches batches;
    append(groups.members, groups.units, 1, batches);
    const PipelineTimes times = stage_times(cost_, sequences_, batches, 0, budgets_);
    if (busiest_stage(times) >= best_.makespan) return;
    std::vector<double> time(static_cast<size_t>(groups.count()), 0.0);  // on the first stage
    for (size_t g = 0; g < time.size(); ++g)
      for (int i = groups.begin[g]; i < groups.begin[g + 1]; ++i)
        time[g] += times.forward[times.at(i, 0)] + times.backward[times.at(i, 0)];
    const std::vector<std::vector<int>> orders = group_orders(groups, time, all_orders);
    // The likeliest order was tried as the best one was found.
    for (size_t o = all_orders && best_.chunk == chunk && best_.packs == groups.packs ? 1 : 0; o < orders.size(); ++o) {
      std::vector<int> sizes, places;
      for (const int g : orders[o]) {
        sizes.push_back(groups.size(g));
        for (int k = 0; k < sizes.back(); ++k) places.push_back(groups.begin[static_cast<size_t>(g)] + k);
      }
      // With one stage nothing waits, and running ahead would only take memory.
      int ahead = cost_.stages() > 1 ? longest : 1;
      const auto schedule = room(sizes, groups, ahead);
      if (schedule == nullptr) continue;
      const double makespan = schedule->makespan(times, places);
      if (makespan >= best_.makespan) continue;
      best_ = {groups.members, {}, ahead, makespan, chunk, groups.packs};
      for (const int place : places) best_.units.push_back(groups.units[static_cast<size_t>(place)]);
    }
  }

  // `least`: packs, where there are as many short sequences.
  Groups make_groups(int64_t chunk, size_t least) const {
    const int64_t edge = piece_edge(cost_.spec());
    Groups groups;
    const auto add = [&](std::span<const int> members, const Piece& piece) {
      groups.units.push_back({static_cast<int>(groups.members.size()), static_cast<int>(members.size()), piece});
      groups.members.insert(groups.members.end(), members.begin(), members.end());
    };
    std::vector<int> shorter;
    for (const int member : members_) {
      const int64_t length = sequences_[static_cast<size_t>(member)].tokens;
      if (length <= chunk) {
        shorter.push_back(member);
        continue;
      }
      for (const Piece& piece : cut_sequence(length, chunk, edge)) add({&member, 1}, piece);
      groups.end_group();
    }
    groups.packed = shorter.size();
    for (auto& pack : packs(std::move(shorter), chunk, least)) {
      ++groups.packs;
      std::sort(pack.begin(), pack.end());
      add(pack, {});
      groups.end_group();
    }
    return groups;
  }

  // The fewest packs that hold, but no fewer than `wanted`, about equal: longest first into the one with the fewest
  // tokens.
  std::vector<std::vector<int>> packs(std::vector<int> shorter, int64_t chunk, size_t wanted) const {
    if (shorter.empty()) return {};
    const auto tokens = [&](int member) { return sequences_[static_cast<size_t>(member)].tokens; };
    if (batching_.reorder)
      std::stable_sort(shorter.begin(), shorter.end(), [&](int a, int b) { return tokens(a) > tokens(b); });
    const int64_t cap = batching_.micro_batch_tokens > 0 ? std::min(chunk, batching_.micro_batch_tokens) : chunk;
    const size_t most = batching_.max_sequences > 0 ? static_cast<size_t>(batching_.max_sequences) : shorter.size();
    int64_t total = 0;
    for (const int member : shorter) total += tokens(member);
    for (size_t count = std::max(static_cast<size_t>((total + cap - 1) / cap), wanted);; ++count) {
      std::vector<std::vector<int>> packs(std::min(count, shorter.size()));
      std::vector<int64_t> held(packs.size(), 0);
      bool fits = true;
      for (const int member : shorter) {
        const auto least = static_cast<size_t>(std::min_element(held.begin(), held.end()) - held.begin());
        held[least] += tokens(member);
        packs[least].push_back(member);
        fits = fits && held[least] <= cap && packs[least].size() <= most;
      }
      if (fits || packs.size() == shorter.size()) return packs;
    }
  }

  // All that a stage does, one operation at a time.
  static double busiest_stage(const PipelineTimes& times) {
    std::vector<double> busy(static_cast<size_t>(times.stages), 0.0);
    for (int i = 0; i < times.micro_batches; ++i)
      for (int s = 0; s < times.stages; ++s)
        busy[static_cast<size_t>(s)] += times.forward[times.at(i, s)] + times.backward[times.at(i, s)];
    for (size_t s = 0; s < times.tail.size(); ++s) busy[s] += times.tail[s].least + times.gather.front().least;
    return *std::max_element(busy.begin(), busy.end());
  }

  // Orders of the groups worth a simulation; without reordering the one they have: by their first sequence.
  std::vector<std::vector<int>> group_orders(const Groups& groups, std::span<const double> time,
                                             bool all_orders) const {
    std::vector<int> order(static_cast<size_t>(groups.count()));
    std::iota(order.begin(), order.end(), 0);
    const auto size = [&](int g) { return groups.size(g); };
    if (!batching_.reorder) {
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return groups.first_member(a) < groups.first_member(b); });
      return {order};
    }
    // Many pieces first, so that the last sequences to drain are short.
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return size(a) != size(b) ? size(a) > size(b) : time[static_cast<size_t>(a)] > time[static_cast<size_t>(b)];
    });
    std::vector<std::vector<int>> orders{order};
    if (cost_.stages() == 1 || order.size() < 2 || !all_orders) return orders;
    // Or a short one before them, to fill the pipeline sooner.
    if (size(order.back()) == 1) {
      orders.push_back(order);
      std::rotate(orders.back().begin(), orders.back().end() - 1, orders.back().end());
    }
    if (order.size() > 2 && size(order[order.size() - 2]) == 1) {
      orders.push_back(order);
      std::rotate(orders.back().begin(), orders.back().end() - 2, orders.back().end() - 1);
    }
    orders.push_back(small_at_both_ends(time, true));
    orders.emplace_back(order.rbegin(), order.rend());
    return orders;
  }

  // The schedule with forwards as far ahead as wanted, or as far as memory allows; null: none fits.
  std::unique_ptr<const Schedule> room(const std::vector<int>& sizes, const Groups& groups, int& ahead) const {
    for (;; --ahead) {
      auto schedule = std::make_unique<const Schedule>(cost_.stages(), sizes, ahead, cost_.layout().warmup_depth);
      if (options_.kept_tokens.empty() || fits(*schedule, groups)) return schedule;
      if (ahead == 1) return nullptr;
    }
  }

  // Every slot is as large as the largest micro-batch of the step.
  bool fits(const Schedule& schedule, const Groups& groups) const {
    int64_t largest = 0;
    for (const Unit& unit : groups.units) largest = std::max(largest, tokens(groups, unit));
    for (int s = 0; s < cost_.stages(); ++s)
      if (schedule.slots(s) * largest > options_.kept_tokens[static_cast<size_t>(s)]) return false;
    return true;
  }

  int64_t tokens(const Groups& groups, const Unit& unit) const {
    if (unit.piece.end > 0) return unit.piece.end - unit.piece.begin;
    int64_t sum = 0;
    for (int i = unit.first; i < unit.first + unit.count; ++i)
      sum += sequences_[static_cast<size_t>(groups.members[static_cast<size_t>(i)])].tokens;
    return sum;
  }

  const CostModel& cost_;
  std::span<const Sequence> sequences_;
  std::span<const int32_t> budgets_;
  const BatchingOptions& batching_;
  const ChunkOptions& options_;
  std::vector<int> members_;
  Arrangement best_;
};

// In a large step other sizes are tried only where they count: on the slowest ranks.
void improve_slowest(std::vector<RankChunks>& ranks, std::span<const int64_t> sizes, ThreadPool* pool) {
  const size_t count = std::min<size_t>(ranks.size(), 32);
  std::vector<RankChunks*> slowest;
  for (RankChunks& rank : ranks) slowest.push_back(&rank);
  std::partial_sort(slowest.begin(), slowest.begin() + static_cast<ptrdiff_t>(count), slowest.end(),
                    [](const RankChunks* a, const RankChunks* b) { return a->best().makespan > b->best().makespan; });
  parallel_pieces(pool, static_cast<int64_t>(count), [&](int64_t i, int) {
    for (const int64_t size : sizes) slowest[static_cast<size_t>(i)]->attempt(size);
  });
}

}  // namespace

std::vector<int64_t> chunk_sizes(const ChunkOptions& options, int64_t edge) {
  if (!options.automatic()) return {options.tokens};
  std::vector<int64_t> sizes;
  for (const int64_t size : kSizes)
    if (const int64_t rounded = (size + edge - 1) / edge * edge; std::ranges::find(sizes, rounded) == sizes.end())
      sizes.push_back(rounded);
  return sizes;
}

std::vector<Piece> cut_sequence(int64_t length, int64_t chunk, int64_t edge) {
  SB_CHECK(length > 0 && chunk > 0 && edge > 0 && chunk % edge == 0, "{} tokens in pieces of {}, edges of {}", length,
           chunk, edge);
  const int64_t count = (length + chunk - 1) / chunk, blocks = (length + edge - 1) / edge;
  if (count == 1) return {Piece{}};
  std::vector<Piece> pieces;
  for (int64_t i = 0, begin = 0; i < count; ++i) {
    const int64_t end = std::min(length, blocks * (i + 1) / count * edge);
    pieces.push_back({begin, end});
    begin = end;
  }
  return pieces;
}

double cut_cost(const CostModel& cost, const Sequence& sequence, int64_t budget, int64_t chunk) {
  double sum = 0;
  const auto add = [&](const Piece& piece, int64_t tokens, double share) {
    const StageTime linear = cost.linear(static_cast<double>(tokens));
    const StageTime attention = cost.attention(work_of(cost.spec(), sequence.tokens, piece, budget));
    sum += share * (linear.forward + linear.backward) + attention.forward + attention.backward;
  };
  if (sequence.tokens <= chunk) {
    // Its share of a full pack.
    add({}, chunk, static_cast<double>(sequence.tokens) / static_cast<double>(chunk));
    return sum;
  }
  for (const Piece& piece : cut_sequence(sequence.tokens, chunk, piece_edge(cost.spec())))
    add(piece, piece.end - piece.begin, 1.0);
  return sum;
}

std::optional<Batches> make_chunks(const CostModel& cost, std::span<const Sequence> sequences,
                                   std::span<const int> rank, std::span<const int32_t> budgets,
                                   const BatchingOptions& batching, const ChunkOptions& options, ThreadPool* pool) {
  const int64_t edge = piece_edge(cost.spec());
  SB_USER_CHECK(options.automatic() || (options.tokens > 0 && options.tokens % edge == 0),
                "pieces of {} tokens are not a multiple of {}, where key blocks of {} and query blocks of {} both end",
                options.tokens, edge, cost.spec().block, cost.spec().query_block);
  const std::vector<int64_t> sizes = chunk_sizes(options, edge);
  std::vector<std::vector<int>> members(static_cast<size_t>(cost.layout().dp));
  for (size_t i = 0; i < rank.size(); ++i) members[static_cast<size_t>(rank[i])].push_back(static_cast<int>(i));
  std::vector<RankChunks> ranks;
  for (auto& own : members) ranks.emplace_back(cost, sequences, budgets, batching, options, std::move(own));
  const bool small = sequences.size() <= kSmallStep;
  const size_t everywhere = small ? sizes.size() : 1;
  parallel_pieces(pool, std::ssize(ranks), [&](int64_t r, int) {
    RankChunks& own = ranks[static_cast<size_t>(r)];
    for (size_t i = 0; i < everywhere; ++i) own.attempt(sizes[i]);
    // Other orders of the best size; of all where memory has no room for the likeliest.
    if (small && batching.reorder)
      for (const int64_t size : own.best().chunk > 0 ? std::vector{own.best().chunk} : sizes) own.attempt(size, true);
  });
  if (everywhere < sizes.size()) improve_slowest(ranks, std::span(sizes).subspan(everywhere), pool);
  Batches batches;
  for (const RankChunks& own : ranks) {
    if (own.best().makespan == kNever) return std::nullopt;
    RankChunks::append(own.best().members, own.best().units, own.best().ahead, batches);
  }
  return batches;
}

double pieces_lower_bound(const CostModel& cost, const Batches& batches, std::span<const PipelineTimes> times) {
  const int stages = cost.stages();
  const auto count = static_cast<size_t>(stages);
  std::vector<double> busy(count, 0.0), fill(count, kNever), drain(count, kNever), longest(count, 0.0);
  for (int r = 0; r < batches.ranks(); ++r) {
    const PipelineTimes& own = times[static_cast<size_t>(r)];
    int i = 0;
    for (const int size : batches.groups(r)) {
      std::vector<double> group(count, 0.0);  // its work on every stage
      for (const int begin = i; i < begin + size; ++i) {
        double forward = 0, backward = 0;  // on the stages before
        for (int s = 0; s < stages; ++s) {
          const auto us = static_cast<size_t>(s);
          fill[us] = std::min(fill[us], forward);
          drain[us] = std::min(drain[us], backward);
          // The first piece comes through them on its way there, and leaves through them last.
          if (i == begin) group[us] += forward + backward;
          group[us] += own.forward[own.at(i, s)] + own.backward[own.at(i, s)];
          busy[us] += own.forward[own.at(i, s)] + own.backward[own.at(i, s)];
          forward += own.forward[own.at(i, s)];
          backward += own.backward[own.at(i, s)];
          if (!own.backward_transfer.empty()) backward += own.backward_transfer[own.at(i, s)];
        }
      }
      for (size_t s = 0; s < count; ++s) longest[s] = std::max(longest[s], group[s]);
    }
  }
  double bound = 0;
  for (int s = 0; s < stages; ++s) {
    const auto us = static_cast<size_t>(s);
    const double load = fill[us] + busy[us] / cost.layout().dp + std::max(drain[us], cost.tail(s).least);
    bound = std::max({bound, longest[us], cost.gather(0).least + load});
  }
  return bound;
}

}  // namespace sb
