#include "train/sums/step_sums.h"

#include <algorithm>
#include <array>

namespace sb {

double accuracy(const LossSums& sums) {
  return sums.targets > 0 ? static_cast<double>(sums.correct) / static_cast<double>(sums.targets) : 0.0;
}

LossSums sum_over_ranks(Communicator& world, const LossSums& own) {
  std::array<double, 2> losses = {own.weighted, own.nll};
  std::array<int64_t, 2> counts = {own.targets, own.correct};
  world.all_reduce(std::span<double>(losses));
  world.all_reduce(std::span<int64_t>(counts));
  return {losses[0], losses[1], counts[0], counts[1]};
}

std::vector<Pipeline::SourceLoss> sum_over_ranks(Communicator& world, std::vector<Pipeline::SourceLoss> own,
                                                 size_t sources) {
  own.resize(sources);
  std::vector<double> losses;
  std::vector<int64_t> targets;
  for (const Pipeline::SourceLoss& source : own) {
    losses.push_back(source.nll);
    targets.push_back(source.targets);
  }
  world.all_reduce(std::span<double>(losses));
  world.all_reduce(std::span<int64_t>(targets));
  for (size_t i = 0; i < sources; ++i) own[i] = {losses[i], targets[i]};
  return own;
}

StepMeasurement gather_times(Grid& grid, const Plan& plan, const std::vector<Pipeline::Operation>& own) {
  size_t most = 0;
  for (const PlannedRank& rank : plan.ranks) most = std::max(most, rank.micro_batches.size());
  // Every rank's forward times, then its backward times, of both halves.
  const size_t share = 2 * most;
  std::vector<int64_t> times(share * static_cast<size_t>(grid.world().size()), 0);
  for (const Pipeline::Operation& operation : own)
    times[static_cast<size_t>(grid.world().rank()) * share + (operation.pass == Pipeline::Pass::forward ? 0 : most) +
          static_cast<size_t>(operation.micro_batch)] += operation.nanoseconds();
  grid.world().all_gather(std::span(times), static_cast<int64_t>(share));

  StepMeasurement measurement;
  if (grid.world().rank() != 0) return measurement;
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    std::vector<MicroBatchTimes>& batches = measurement.ranks.emplace_back(plan.ranks[rank].micro_batches.size());
    for (int stage = 0; stage < grid.shape().pp; ++stage) {
      const int64_t* of_rank =
          times.data() + static_cast<size_t>(grid.rank_of(static_cast<int>(rank), stage, 0, 0)) * share;
      for (size_t i = 0; i < batches.size(); ++i) {
        batches[i].forward.push_back(of_rank[i]);
        batches[i].backward.push_back(of_rank[most + i]);
      }
    }
  }
  return measurement;
}

}  // namespace sb
