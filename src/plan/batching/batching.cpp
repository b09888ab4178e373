#include "plan/batching/batching.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"
#include "plan/batching/partition.h"
#include "plan/batching/pipeline_search.h"

namespace sb {
namespace {

// From the slot (rank · per_rank + micro-batch) of every sequence. Micro-batches stand in the order of their first
// sequence, so that a batching without ordering does not smuggle one in.
Batches from_slots(std::span<const int> slot, int dp, int per_rank) {
  const auto slots = static_cast<size_t>(dp * per_rank);
  std::vector<int> count(slots, 0), first(slots, -1);
  for (size_t i = 0; i < slot.size(); ++i) {
    const auto s = static_cast<size_t>(slot[i]);
    ++count[s];
    if (first[s] < 0) first[s] = static_cast<int>(i);
  }
  std::vector<int> place(slots, -1), own(static_cast<size_t>(per_rank));
  Batches batches;
  batches.sequences.resize(slot.size());
  for (int r = 0; r < dp; ++r) {
    std::iota(own.begin(), own.end(), r * per_rank);
    std::sort(own.begin(), own.end(),
              [&](int a, int b) { return first[static_cast<size_t>(a)] < first[static_cast<size_t>(b)]; });
    for (int s : own) {
      if (count[static_cast<size_t>(s)] == 0) continue;
      place[static_cast<size_t>(s)] = batches.micro_batch_begin.back();
      batches.micro_batch_begin.push_back(batches.micro_batch_begin.back() + count[static_cast<size_t>(s)]);
    }
    batches.rank_begin.push_back(batches.micro_batches());
  }
  for (size_t i = 0; i < slot.size(); ++i)
    batches.sequences[static_cast<size_t>(place[static_cast<size_t>(slot[i])]++)] = static_cast<int>(i);
  return batches;
}

// Consecutive sequences, consecutive micro-batches; more of them where the caps ask for it.
Batches in_order(std::span<const Sequence> sequences, int dp, int per_rank, const BatchingOptions& options) {
  const int64_t cap = options.micro_batch_tokens;
  const auto n = static_cast<int>(sequences.size());
  std::vector<int> slot(sequences.size());
  const int most = (n + dp - 1) / dp;
  for (int m = per_rank; m <= most; ++m) {
    bool fits = true;
    for (int r = 0; r < dp && fits; ++r) {
      const int begin = static_cast<int>(static_cast<int64_t>(n) * r / dp);
      const int end = static_cast<int>(static_cast<int64_t>(n) * (r + 1) / dp);
      const int groups = std::min(m, end - begin);
      int at = begin;
      for (int g = 0; g < groups; ++g) {
        // An even share, less where the cap is reached; what is left must still be one a group.
        const int later = groups - 1 - g;
        int share = (end - at + later) / (later + 1);
        if (options.max_sequences > 0) share = static_cast<int>(std::min<int64_t>(share, options.max_sequences));
        int64_t held = 0;
        int taken = 0;
        while (at < end - later && taken < (cap > 0 ? end - at : share)) {
          const int64_t next = sequences[static_cast<size_t>(at)].tokens;
          if (taken > 0 && (taken >= share || (cap > 0 && held + next > cap))) break;
          held += next;
          slot[static_cast<size_t>(at++)] = r * m + g;
          ++taken;
        }
      }
      fits = at == end;
      if (!fits && groups == end - begin) throw InternalError("one sequence a micro-batch does not fit");
    }
    if (fits) return from_slots(slot, dp, m);
  }
  throw InternalError("no in-order batching of {} sequences on {} ranks", n, dp);
}

// Bins that hold what `micro_batches` micro-batches may.
PartitionProblem problem_of(std::span<const Sequence> sequences, std::vector<double> weight, int bins,
                            int64_t micro_batches, const BatchingOptions& options) {
  PartitionProblem problem;
  problem.weight = std::move(weight);
  for (const Sequence& sequence : sequences) problem.tokens.push_back(sequence.tokens);
  problem.bins = bins;
  problem.cap = options.micro_batch_tokens * micro_batches;
  problem.max_items = static_cast<int>(std::min(options.max_sequences * micro_batches, std::ssize(sequences)));
  return problem;
}

// Gives every rank the same number of micro-batches, balanced by their loads.
std::vector<int> bins_to_slots(const PartitionProblem& problem, const Assignment& bin, int dp, int per_rank,
                               int64_t trials) {
  PartitionProblem ranks;
  ranks.weight.assign(static_cast<size_t>(problem.bins), 0.0);
  for (size_t i = 0; i < bin.size(); ++i) ranks.weight[static_cast<size_t>(bin[i])] += problem.weight[i];
  ranks.bins = dp;
  ranks.max_items = ranks.min_items = per_rank;
  const Assignment rank = balanced_partition(ranks, trials);
  std::vector<int> next(static_cast<size_t>(dp), 0), slot_of_bin(rank.size());
  for (size_t b = 0; b < rank.size(); ++b) slot_of_bin[b] = rank[b] * per_rank + next[static_cast<size_t>(rank[b])]++;
  std::vector<int> slot(bin.size());
  for (size_t i = 0; i < bin.size(); ++i) slot[i] = slot_of_bin[static_cast<size_t>(bin[i])];
  return slot;
}

// What the policy balances, of every sequence.
std::vector<double> sequence_weights(const CostModel& cost, std::span<const Sequence> sequences,
                                     std::span<const SequenceCost> costs, const BatchingOptions& options) {
  if (options.policy == BatchingPolicy::compared) return options.compared->weights(cost, sequences);
  std::vector<double> weight;
  for (const SequenceCost& own : costs)
    weight.push_back(cost.layers() * (own.layer.forward + own.layer.backward) + own.head.forward + own.head.backward);
  return weight;
}

// Without a pipeline only the ranks' sums count: balance those, then the micro-batches of each rank for their own sake.
Batches sab_data_parallel(std::span<const Sequence> sequences, const std::vector<double>& weight, int dp, int per_rank,
                          const BatchingOptions& options) {
  const PartitionProblem ranks = problem_of(sequences, weight, dp, per_rank, options);
  const Assignment rank = balanced_partition(ranks, options.trials);
  if (rank.empty()) return {};
  std::vector<int> slot(sequences.size());
  for (int r = 0; r < dp; ++r) {
    std::vector<int> members;
    std::vector<Sequence> own_sequences;
    std::vector<double> own_weight;
    for (size_t i = 0; i < rank.size(); ++i) {
      if (rank[i] != r) continue;
      members.push_back(static_cast<int>(i));
      own_weight.push_back(weight[i]);
      own_sequences.push_back(sequences[i]);
    }
    const int bins = std::min(per_rank, static_cast<int>(members.size()));
    const Assignment bin = longest_first(problem_of(own_sequences, std::move(own_weight), bins, 1, options));
    if (bin.empty()) return {};
    for (size_t i = 0; i < bin.size(); ++i) slot[static_cast<size_t>(members[i])] = r * per_rank + bin[i];
  }
  return from_slots(slot, dp, per_rank);
}

}  // namespace

std::vector<int> Batches::groups(int rank) const {
  std::vector<int> sizes;
  for (int i = first(rank); i < first(rank) + micro_batches(rank); ++i) {
    if (piece(i).begin > 0)
      ++sizes.back();
    else
      sizes.push_back(1);
  }
  return sizes;
}

int64_t Batches::tokens(std::span<const Sequence> all, int micro_batch) const {
  if (const Piece own = piece(micro_batch); own.end > 0) return own.end - own.begin;
  int64_t sum = 0;
  for (const int member : members(micro_batch)) sum += all[static_cast<size_t>(member)].tokens;
  return sum;
}

std::string BatchingOptions::name() const {
  return policy == BatchingPolicy::compared ? compared->name : word_of(kBatchingWords, policy);
}

void check_sequences(std::span<const Sequence> sequences, int dp, int64_t cap) {
  SB_USER_CHECK(!sequences.empty(), "the global batch is empty");
  SB_USER_CHECK(static_cast<int64_t>(sequences.size()) >= dp,
                "a global batch of {} sequences is smaller than dp {}: some ranks would have nothing to do; raise the "
                "global batch or lower dp",
                sequences.size(), dp);
  for (const Sequence& sequence : sequences) {
    SB_USER_CHECK(sequence.tokens > 0, "sequence {} has {} tokens; lengths must be positive", sequence.id,
                  sequence.tokens);
    SB_USER_CHECK(cap == 0 || sequence.tokens <= cap,
                  "sequence {} has {} tokens, more than the cap of {} per micro-batch; raise micro_batch_tokens, or "
                  "split sequences with balance.chunk",
                  sequence.id, sequence.tokens, cap);
  }
}

std::vector<SequenceCost> sequence_costs(const CostModel& cost, std::span<const Sequence> sequences,
                                         std::span<const int64_t> budgets) {
  const StageTime l0 = cost.linear(0), a0 = cost.attention({}), h0 = cost.head(0);
  const double dense = static_cast<double>(cost.spec().dense_layers.size()) / cost.layers();
  std::vector<SequenceCost> costs(sequences.size());
  for (size_t i = 0; i < costs.size(); ++i) {
    const auto tokens = static_cast<double>(sequences[i].tokens);
    const StageTime l = cost.linear(tokens), h = cost.head(tokens);
    StageTime a = cost.attention(work_of(cost.spec(), sequences[i].tokens, budgets[i]));
    if (dense > 0) {
      // One kind of layer, that takes what they take on average.
      const StageTime d = cost.attention(work_of(cost.spec(), sequences[i].tokens, sequences[i].tokens));
      a = {a.forward + dense * (d.forward - a.forward), a.backward + dense * (d.backward - a.backward)};
    }
    costs[i].layer = {l.forward - l0.forward + a.forward - a0.forward,
                      l.backward - l0.backward + a.backward - a0.backward};
    costs[i].head = {h.forward - h0.forward, h.backward - h0.backward};
  }
  return costs;
}

Batches make_batches(const CostModel& cost, std::span<const Sequence> sequences, std::span<const int64_t> budgets,
                     const BatchingOptions& options) {
  const int dp = cost.layout().dp;
  const int64_t cap = options.micro_batch_tokens;
  check_sequences(sequences, dp, cap);
  SB_USER_CHECK(options.micro_batch_sequences > 0 || cap > 0,
                "the size of a micro-batch is not set; set micro_batch_sequences, micro_batch_tokens, or both");
  const auto n = static_cast<int64_t>(sequences.size());
  const auto most = static_cast<int>(n / dp);
  const auto a_rank = [&](int64_t micro_batches) { return (micro_batches + dp - 1) / dp; };
  int64_t wanted = 1;
  for (const int64_t a_micro_batch : {options.micro_batch_sequences, options.max_sequences})
    if (a_micro_batch > 0) wanted = std::max(wanted, a_rank((n + a_micro_batch - 1) / a_micro_batch));
  if (cap > 0) {
    std::vector<int64_t> tokens;
    for (const Sequence& sequence : sequences) tokens.push_back(sequence.tokens);
    wanted = std::max(wanted, a_rank(fewest_bins(std::move(tokens), cap)));
  }
  const int first = static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
  if (options.policy == BatchingPolicy::in_order) return in_order(sequences, dp, first, options);

  const auto costs = sequence_costs(cost, sequences, budgets);
  PartitionProblem problem = problem_of(sequences, sequence_weights(cost, sequences, costs, options), 0, 1, options);
  const bool sab = options.policy == BatchingPolicy::sab;
  for (int per_rank = first; per_rank <= most; ++per_rank) {
    if (sab && cost.stages() == 1) {
      Batches batches = sab_data_parallel(sequences, problem.weight, dp, per_rank, options);
      if (batches.ranks() > 0) return batches;
      continue;
    }
    problem.bins = dp * per_rank;
    const Assignment bin = sab ? balanced_partition(problem, options.trials) : options.compared->fill(problem);
    if (bin.empty()) continue;
    std::vector<int> slot = bins_to_slots(problem, bin, dp, per_rank, options.trials);
    if (sab) improve_pipeline(cost, sequences, costs, per_rank, options, slot);
    return from_slots(slot, dp, per_rank);
  }
  // The cap leaves no room for equal numbers of micro-batches this way; consecutive packing always has one.
  Batches batches = in_order(sequences, dp, first, options);
  batches.no_room = true;
  return batches;
}

double step_lower_bound(const CostModel& cost, std::span<const Sequence> sequences, size_t layers,
                        std::span<const int32_t> budgets, std::span<const double> stage_busy, ThreadPool* pool) {
  // Longest sequence through all stages, and the least that a layer takes.
  struct Extremes {
    double longest = 0, least_forward = 1e300, least_backward = 1e300;
  };
  constexpr int64_t kChunk = 64;
  const auto count = std::ssize(sequences);
  std::vector<Extremes> chunks(static_cast<size_t>((count + kChunk - 1) / kChunk));
  parallel_pieces(pool, std::ssize(chunks), [&](int64_t c, int) {
    Extremes own;
    for (auto i = static_cast<size_t>(c * kChunk); i < static_cast<size_t>(std::min(count, (c + 1) * kChunk)); ++i) {
      const auto tokens = static_cast<double>(sequences[i].tokens);
      const StageTime linear = cost.linear(tokens), head = cost.head(tokens);
      double sum = head.forward + head.backward;
      StageTime attention;
      for (size_t l = 0; l < layers; ++l) {
        const int32_t budget = budgets[i * layers + l];
        if (l == 0 || budget != budgets[i * layers + l - 1])
          attention = cost.attention(work_of(cost.spec(), sequences[i].tokens, budget));
        const StageTime layer{linear.forward + attention.forward, linear.backward + attention.backward};
        sum += layer.forward + layer.backward;
        own.least_forward = std::min(own.least_forward, layer.forward);
        own.least_backward = std::min(own.least_backward, layer.backward);
      }
      own.longest = std::max(own.longest, sum);
    }
    chunks[static_cast<size_t>(c)] = own;
  });
  Extremes all;
  for (const Extremes& own : chunks) {
    all.longest = std::max(all.longest, own.longest);
    all.least_forward = std::min(all.least_forward, own.least_forward);
    all.least_backward = std::min(all.least_backward, own.least_backward);
  }
  double bound = all.longest;
  for (int s = 0; s < cost.stages(); ++s) {
    // Before its first forward a stage waits for the stages before it, and the first one for weights; after its last
    // backward they still run, and its own gradients are reduced.
    const double fill = all.least_forward * cost.first_layer(s), drain = all.least_backward * cost.first_layer(s);
    bound = std::max(bound, cost.gather(0).least + fill + stage_busy[static_cast<size_t>(s)] / cost.layout().dp +
                                std::max(drain, cost.tail(s).least));
  }
  return bound;
}

}  // namespace sb
