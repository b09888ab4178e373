#include "plan/batching/pipeline_search.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb {
namespace {

class PipelineSearch {
 public:
  PipelineSearch(const CostModel& cost, std::span<const Sequence> sequences, std::span<const SequenceCost> costs,
                 int per_rank, const BatchingOptions& options, std::vector<int>& slot)
      : sequences_(sequences),
        costs_(costs),
        options_(options),
        slot_(slot),
        per_rank_(per_rank),
        shared_(shared_schedule(cost.stages(), per_rank, cost.layout().warmup_depth)),
        schedule_(*shared_) {
    const auto slots = static_cast<size_t>(cost.layout().dp * per_rank);
    members_.resize(slots);
    load_.resize(slots);
    for (size_t i = 0; i < slot.size(); ++i) {
      members_[static_cast<size_t>(slot[i])].push_back(static_cast<int>(i));
      add(load_[static_cast<size_t>(slot[i])], static_cast<int>(i), 1);
    }
    const auto size = static_cast<size_t>(cost.stages() * per_rank);
    times_.stages = cost.stages();
    times_.micro_batches = per_rank;
    times_.forward.resize(size);
    times_.backward.resize(size);
    if (cost.layout().comm) {
      times_.forward_transfer.resize(size);
      times_.backward_transfer.resize(size);
      cost.add_exposed(times_);
      // Transfers are linear in the tokens; nothing enters the first stage or comes back into the last.
      for (int s = 0; s <= cost.stages(); ++s) {
        const bool any = s > 0 && s < cost.stages();
        transfer_fixed_.push_back(any ? cost.transfer(s, 0) : 0.0);
        transfer_rate_.push_back(any ? cost.transfer(s, 1) - cost.transfer(s, 0) : 0.0);
      }
    }
    for (int s = 0; s < cost.stages(); ++s) layers_.push_back(cost.stage_layers(s));
    base_layer_ = {cost.linear(0).forward + cost.attention({}).forward,
                   cost.linear(0).backward + cost.attention({}).backward};
    base_head_ = cost.head(0);
    // A trial simulates two ranks, each in two orders.
    const int64_t operations = 8 * static_cast<int64_t>(size);
    const int64_t most = sequences.size() <= kSmallStep ? 160'000 : 25'000;
    trials_ = std::min(options.trials, std::max<int64_t>(16, most / operations));
    for (int r = 0; r < cost.layout().dp; ++r) makespan_.push_back(rank_makespan(r));
  }

  void run() {
    while (trials_ > 0 && improve_slowest()) {
    }
  }

 private:
  struct Load {
    StageTime layer, head;
    int64_t tokens = 0;
    int first = 0;
  };

  void add(Load& load, int item, int sign) const {
    const SequenceCost& c = costs_[static_cast<size_t>(item)];
    load.layer.forward += sign * c.layer.forward;
    load.layer.backward += sign * c.layer.backward;
    load.head.forward += sign * c.head.forward;
    load.head.backward += sign * c.head.backward;
    load.tokens += sign * sequences_[static_cast<size_t>(item)].tokens;
  }

  double rank_makespan(int rank) {
    for (int i = 0; i < per_rank_; ++i) {
      const Load& load = load_[static_cast<size_t>(rank * per_rank_ + i)];
      for (int s = 0; s < times_.stages; ++s) {
        const bool last = s + 1 == times_.stages;
        const size_t at = times_.at(i, s);
        const double layers = layers_[static_cast<size_t>(s)];
        times_.forward[at] =
            layers * (base_layer_.forward + load.layer.forward) + (last ? base_head_.forward + load.head.forward : 0.0);
        times_.backward[at] = layers * (base_layer_.backward + load.layer.backward) +
                              (last ? base_head_.backward + load.head.backward : 0.0);
        if (!times_.forward_transfer.empty()) {
          const auto tokens = static_cast<double>(load.tokens);
          const auto us = static_cast<size_t>(s);
          times_.forward_transfer[at] = transfer_fixed_[us] + tokens * transfer_rate_[us];
          times_.backward_transfer[at] = transfer_fixed_[us + 1] + tokens * transfer_rate_[us + 1];
        }
      }
    }
    if (!options_.reorder) {
      order_.resize(static_cast<size_t>(per_rank_));
      std::iota(order_.begin(), order_.end(), 0);
      const auto first_of = [&](int i) {
        const auto& list = members_[static_cast<size_t>(rank * per_rank_ + i)];
        return *std::min_element(list.begin(), list.end());
      };
      std::sort(order_.begin(), order_.end(), [&](int a, int b) { return first_of(a) < first_of(b); });
      return schedule_.makespan(times_, order_);
    }
    ascending_.resize(static_cast<size_t>(per_rank_));
    std::iota(ascending_.begin(), ascending_.end(), 0);
    const auto weight = [&](int i) { return load_[static_cast<size_t>(rank * per_rank_ + i)].layer.forward; };
    std::sort(ascending_.begin(), ascending_.end(), [&](int a, int b) { return weight(a) < weight(b); });
    double best = 1e300;
    order_.resize(ascending_.size());
    for (bool smallest_first : {true, false}) {
      size_t front = 0, back = order_.size();
      bool to_front = smallest_first;
      for (int item : ascending_) {
        order_[to_front ? front++ : --back] = item;
        to_front = !to_front;
      }
      best = std::min(best, schedule_.makespan(times_, order_));
    }
    return best;
  }

  void put(int item, int to) {
    const auto i = static_cast<size_t>(item);
    std::erase(members_[static_cast<size_t>(slot_[i])], item);
    add(load_[static_cast<size_t>(slot_[i])], item, -1);
    slot_[i] = to;
    members_[static_cast<size_t>(to)].push_back(item);
    add(load_[static_cast<size_t>(to)], item, 1);
  }

  bool fits(int slot) const {
    const auto s = static_cast<size_t>(slot);
    return (options_.micro_batch_tokens == 0 || load_[s].tokens <= options_.micro_batch_tokens) &&
           (options_.max_sequences == 0 || std::ssize(members_[s]) <= options_.max_sequences);
  }

  // Moves `item` to `slot`, and `back` (or nothing: -1) the other way; keeps it if both ranks end below the limit.
  bool attempt(int item, int slot, int back, double limit) {
    const int from = slot_[static_cast<size_t>(item)];
    if (back < 0 && members_[static_cast<size_t>(from)].size() == 1) return false;
    --trials_;
    put(item, slot);
    if (back >= 0) put(back, from);
    const int a = from / per_rank_, b = slot / per_rank_;
    if (fits(slot) && fits(from)) {
      const double time_a = rank_makespan(a);
      if (time_a < limit) {
        const double time_b = a == b ? time_a : rank_makespan(b);
        if (time_b < limit) {
          makespan_[static_cast<size_t>(a)] = time_a;
          makespan_[static_cast<size_t>(b)] = time_b;
          return true;
        }
      }
    }
    put(item, from);
    if (back >= 0) put(back, slot);
    return false;
  }

  bool improve_slowest() {
    const int slowest = static_cast<int>(std::max_element(makespan_.begin(), makespan_.end()) - makespan_.begin());
    const double limit = makespan_[static_cast<size_t>(slowest)] * (1 - 1e-9);
    const int slots = static_cast<int>(members_.size());
    std::vector<int> mine;
    for (int i = 0; i < per_rank_; ++i) {
      const auto& list = members_[static_cast<size_t>(slowest * per_rank_ + i)];
      mine.insert(mine.end(), list.begin(), list.end());
    }
    // Fastest ranks first: they have the most room.
    std::vector<int> ranks(makespan_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return makespan_[static_cast<size_t>(a)] < makespan_[static_cast<size_t>(b)];
    });
    for (int rank : ranks) {
      for (int slot = rank * per_rank_; slot < std::min(slots, (rank + 1) * per_rank_); ++slot) {
        const std::vector<int> others = members_[static_cast<size_t>(slot)];
        for (int item : mine) {
          if (slot_[static_cast<size_t>(item)] == slot) continue;
          if (trials_ <= 0) return false;
          if (attempt(item, slot, -1, limit)) return true;
          for (int other : others) {
            if (trials_ <= 0) return false;
            // Giving away less than one gets back helps only inside the own rank.
            if (rank != slowest &&
                costs_[static_cast<size_t>(other)].layer.forward >= costs_[static_cast<size_t>(item)].layer.forward)
              continue;
            if (attempt(item, slot, other, limit)) return true;
          }
        }
      }
    }
    return false;
  }

  std::span<const Sequence> sequences_;
  std::span<const SequenceCost> costs_;
  const BatchingOptions& options_;
  std::vector<int>& slot_;
  int per_rank_;
  std::shared_ptr<const Schedule> shared_;
  const Schedule& schedule_;
  std::vector<std::vector<int>> members_;
  std::vector<Load> load_;
  PipelineTimes times_;
  std::vector<double> transfer_fixed_, transfer_rate_, layers_;
  StageTime base_layer_, base_head_;
  std::vector<double> makespan_;
  std::vector<int> order_, ascending_;
  int64_t trials_;
};

}  // namespace

void improve_pipeline(const CostModel& cost, std::span<const Sequence> sequences, std::span<const SequenceCost> costs,
                      int per_rank, const BatchingOptions& options, std::vector<int>& slot) {
  PipelineSearch(cost, sequences, costs, per_rank, options, slot).run();
}

}  // namespace sb
