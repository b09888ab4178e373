#include "plan/tuning/price_tuner.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"
#include "plan/schedule/vector_kernels.h"

namespace sb {
namespace {

constexpr int kLanes = Schedule::kLanes;

// Linear between the levels.
template <size_t kCount>
double between(const std::array<double, kCount>& values, double level) {
  const double inside = std::clamp(level, 0.0, static_cast<double>(kCount - 1));
  const auto i = std::min(static_cast<size_t>(inside), kCount - 2);
  return values[i] + (values[i + 1] - values[i]) * (inside - static_cast<double>(i));
}

}  // namespace

PriceTuner::PriceTuner(const TuningInput& input)
    : input_(input),
      uniform_(input.curves.uniform()),
      stages_(input.cost.stages()),
      ranks_(static_cast<size_t>(input.batches.ranks())),
      scratch_(static_cast<size_t>(pool_threads(input.pool))) {
  choose_prices();
  size_t count = 0;
  for (int r = 0; r < input.batches.ranks(); ++r) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    rank.schedule = &input.schedules.of(r);
    rank.first = count;
    rank.count = static_cast<size_t>(input.batches.micro_batches(r) * stages_);
    count += rank.count;
  }
  variables_.resize(count);
  curves_.resize(uniform_ ? count / static_cast<size_t>(stages_) : count);
  parallel_pieces(input.pool, std::ssize(ranks_), [&](int64_t r, int) { build_rank(static_cast<int>(r)); });
  for (const Rank& rank : ranks_) {
    fastest_ = std::max(fastest_, rank.fastest);
    base_makespan_ = std::max(base_makespan_, rank.base_makespan);
  }
}

// So that a level gains about as much as the next one, judged by a sample of the curves.
void PriceTuner::choose_prices() {
  struct Step {
    double slope, gain;
  };
  const int layers = uniform_ ? 1 : input_.cost.layers();
  std::vector<int> open;  // sequences with a choice in some layer
  for (int i = 0; i < static_cast<int>(input_.sequences.size()); ++i)
    for (int l = 0; l < layers; ++l)
      if (input_.curves.vertices(i, l).size() > 1) {
        open.push_back(i);
        break;
      }
  constexpr size_t kSampled = 64;
  const size_t stride = std::max<size_t>(1, open.size() / kSampled);
  std::vector<Step> pieces;
  double total = 0;
  for (size_t i = 0; i < open.size(); i += stride) {
    // Other layers of other sequences.
    const auto vertices = input_.curves.vertices(open[i], static_cast<int>(i / stride) % layers);
    const int64_t tokens = input_.sequences[static_cast<size_t>(open[i])].tokens;
    for (size_t v = 1; v < vertices.size(); ++v) {
      const double pairs = selected_pairs(tokens, vertices[v].budget) - selected_pairs(tokens, vertices[v - 1].budget);
      const double gain = static_cast<double>(tokens) * (vertices[v].coverage - vertices[v - 1].coverage);
      pieces.push_back({gain / pairs, gain});
      total += gain;
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Step& a, const Step& b) { return a.slope > b.slope; });
  price_.fill(0.0);
  price_[0] = std::numeric_limits<double>::infinity();
  double sum = 0;
  size_t level = 1;
  for (const Step& piece : pieces) {
    sum += piece.gain;
    while (level + 1 < kLevels && sum >= total * static_cast<double>(level) / (kLevels - 1))
      price_[level++] = piece.slope;
  }
}

void PriceTuner::build_curve(std::span<const int> members, int first_layer, int layers, Curve& curve) const {
  std::array<double, kLevels> pairs{}, scores{};
  curve.gain.fill(0.0);
  double tokens = 0, tiles = 0;
  const AttentionSpec& spec = input_.cost.spec();
  for (int member : members) {
    const int64_t length = input_.sequences[static_cast<size_t>(member)].tokens;
    const auto weight = static_cast<double>(length);
    const Work whole = work_of(spec, length, length);
    tokens += whole.tokens;
    tiles += whole.tiles;
    const double score = work_of(spec, length, 0).scores;
    for (int l = 0; l < layers; ++l) {
      const auto vertices = input_.curves.vertices(member, first_layer + l);
      double before = selected_pairs(length, vertices[0].budget);
      pairs[0] += before;
      curve.gain[0] += weight * vertices[0].coverage;
      if (vertices[0].budget < length) scores[0] += score;
      size_t level = 1;
      for (size_t v = 1; v < vertices.size(); ++v) {
        const double next = selected_pairs(length, vertices[v].budget);
        const double gain = weight * (vertices[v].coverage - vertices[v - 1].coverage);
        while (gain < price_[level] * (next - before)) ++level;
        pairs[level] += next - before;
        curve.gain[level] += gain;
        if (vertices[v].budget >= length) scores[level] -= score;
        before = next;
      }
    }
  }
  Work work{tokens, tiles, 0, 0};
  for (size_t g = 0; g < kLevels; ++g) {
    if (g > 0) curve.gain[g] += curve.gain[g - 1];
    work.pairs += pairs[g] / layers;
    work.scores += scores[g] / layers;
    const bool same = g > 0 && pairs[g] == 0;
    const StageTime time =
        same ? StageTime{curve.forward[g - 1] / layers, curve.backward[g - 1] / layers} : input_.cost.attention(work);
    curve.forward[g] = layers * time.forward;
    curve.backward[g] = layers * time.backward;
  }
  curve.meant[kLevels - 1] = kLevels - 1;
  for (size_t g = kLevels - 1; g-- > 0;) {
    const bool dearer = curve.forward[g] + curve.backward[g] >= curve.forward[g + 1] + curve.backward[g + 1];
    curve.meant[g] = dearer ? curve.meant[g + 1] : static_cast<uint8_t>(g);
    if (!dearer) continue;
    curve.forward[g] = curve.forward[g + 1];
    curve.backward[g] = curve.backward[g + 1];
    curve.gain[g] = curve.gain[g + 1];
  }
}

void PriceTuner::build_rank(int number) {
  const CostModel& cost = input_.cost;
  const Batches& batches = input_.batches;
  Rank& rank = ranks_[static_cast<size_t>(number)];
  const auto& order = input_.orders[static_cast<size_t>(number)];
  PipelineTimes& times = rank.times;
  times.stages = stages_;
  times.micro_batches = static_cast<int>(order.size());
  times.forward.resize(rank.count);
  times.backward.resize(rank.count);
  const bool comm = cost.layout().comm;
  if (comm) {
    times.forward_transfer.resize(rank.count);
    times.backward_transfer.resize(rank.count);
    cost.add_exposed(times);
  }
  for (size_t position = 0; position < order.size(); ++position) {
    const auto members = batches.members(batches.first(number) + order[position]);
    double tokens = 0;
    for (int member : members) tokens += static_cast<double>(input_.sequences[static_cast<size_t>(member)].tokens);
    const StageTime linear = cost.linear(tokens), head = cost.head(tokens);
    const size_t shared = rank.first / static_cast<size_t>(stages_) + position;
    if (uniform_) build_curve(members, 0, 1, curves_[shared]);
    for (int s = 0; s < stages_; ++s) {
      const size_t at = times.at(static_cast<int>(position), s);
      const int layers = cost.stage_layers(s);
      const size_t own = uniform_ ? shared : rank.first + at;
      if (!uniform_) build_curve(members, cost.first_layer(s), layers, curves_[own]);
      const bool last = s + 1 == stages_;
      variables_[rank.first + at] = {static_cast<int32_t>(own), 0, uniform_ ? static_cast<double>(layers) : 1.0,
                                     layers * linear.forward + (last ? head.forward : 0.0),
                                     layers * linear.backward + (last ? head.backward : 0.0)};
      if (!comm) continue;
      times.forward_transfer[at] = cost.transfer(s, tokens);
      times.backward_transfer[at] = last ? 0.0 : cost.transfer(s + 1, tokens);
    }
  }
  set_level(rank, kLevels - 1);
  rank.slowest = rank.schedule->makespan(times, {});
  rank.top_gain = gain_at(rank, kLevels - 1);
  set_level(rank, 0);
  rank.fastest = rank.schedule->makespan(times, {});
  rank.base_makespan =
      rank.schedule->makespan(stage_times(cost, input_.sequences, batches, number, input_.base), order);
}

void PriceTuner::set_level(Rank& rank, double level) const {
  rank.level = level;
  for (size_t i = 0; i < rank.count; ++i) {
    const Variable& v = variables_[rank.first + i];
    const Curve& curve = curves_[static_cast<size_t>(v.curve)];
    rank.times.forward[i] = v.fixed_forward + v.scale * between(curve.forward, level + v.shift);
    rank.times.backward[i] = v.fixed_backward + v.scale * between(curve.backward, level + v.shift);
  }
}

double PriceTuner::gain_at(const Rank& rank, double level) const {
  double sum = 0;
  for (size_t i = 0; i < rank.count; ++i) {
    const Variable& v = variables_[rank.first + i];
    sum += v.scale * between(curves_[static_cast<size_t>(v.curve)].gain, level + v.shift);
  }
  return sum;
}

void PriceTuner::makespans(const Rank& rank, std::span<const double, kLanes> level, Scratch& scratch,
                           std::span<double, kLanes> out) const {
  // Values at the whole levels that the lanes lie between, and what each lane takes of them.
  const int lowest = static_cast<int>(std::floor(level[0]));
  const auto count = static_cast<size_t>(static_cast<int>(std::ceil(level[kLanes - 1])) - lowest + 1);
  std::array<double, kLanes*(2 * kLevels)> weight{};
  SB_CHECK(count <= 2 * kLevels, "{} levels at once", count);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const auto whole = static_cast<size_t>(level[lane] - lowest);
    const double part = level[lane] - lowest - static_cast<double>(whole);
    weight[whole * kLanes + lane] = 1 - part;
    if (part > 0) weight[(whole + 1) * kLanes + lane] = part;
  }
  scratch.values.resize(2 * rank.count * count);
  double* forward = scratch.values.data();
  double* backward = forward + rank.count * count;
  for (size_t i = 0; i < rank.count; ++i) {
    const Variable& v = variables_[rank.first + i];
    const Curve& curve = curves_[static_cast<size_t>(v.curve)];
    for (size_t q = 0; q < count; ++q) {
      const auto at = static_cast<size_t>(std::clamp(lowest + v.shift + static_cast<int>(q), 0, kLevels - 1));
      *forward++ = v.fixed_forward + v.scale * curve.forward[at];
      *backward++ = v.fixed_backward + v.scale * curve.backward[at];
    }
  }
  scratch.lanes.resize(2 * rank.count * kLanes);
  blend_lanes(scratch.values.data(), 2 * rank.count, count, weight.data(), scratch.lanes.data());
  const std::span<const double> lanes = scratch.lanes;
  rank.schedule->makespans(rank.times, lanes.first(rank.count * kLanes), lanes.subspan(rank.count * kLanes),
                           scratch.ends, out);
}

double PriceTuner::highest_level(Rank& rank, double deadline, double from, Scratch& scratch) const {
  int ahead = 0;
  for (size_t i = 0; i < rank.count; ++i) ahead = std::max(ahead, variables_[rank.first + i].shift);
  // Every budget at its floor meets the deadline, every one at its top does not.
  const double bottom = -static_cast<double>(ahead), top = kLevels - 1;
  double low = bottom, high = top;
  double next_low = low, next_high = high;
  if (!rank.fresh) {
    next_low = std::clamp(from - 1.0, bottom, top - 1.5);
    next_high = std::min(next_low + 1.5, top);
  }
  std::array<double, kLanes> level, makespan;
  constexpr double kFine = 0.3;
  do {
    for (size_t j = 0; j < kLanes; ++j)
      level[j] = next_low + (next_high - next_low) * static_cast<double>(j) / (kLanes - 1);
    makespans(rank, level, scratch, makespan);
    size_t fits = kLanes;
    while (fits > 0 && makespan[fits - 1] > deadline) --fits;
    if (fits == 0) {
      high = next_low;
    } else if (fits == kLanes) {
      low = next_high;
    } else {
      low = level[fits - 1];
      high = level[fits];
      if (high - low <= kFine) {
        const double longer = makespan[fits] - makespan[fits - 1];
        rank.price = (gain_at(rank, high) - gain_at(rank, low)) / longer;
        return low + (high - low) * (deadline - makespan[fits - 1]) / longer;
      }
    }
    next_low = low;
    next_high = high;
  } while (high - low > kFine);
  return low;
}

void PriceTuner::relax_rank(Rank& rank, double deadline, int rounds, Scratch& scratch) {
  rank.price = 0;
  if (rank.slowest <= deadline) {
    set_level(rank, kLevels - 1);
    rank.gain = rank.top_gain;
    return;
  }
  scratch.slack.resize(rank.count);
  scratch.best_shift.resize(rank.count);
  double best_level = 0, best_price = 0, level = rank.level;
  rank.gain = -1;
  for (int round = 0; round < rounds; ++round) {
    level = highest_level(rank, deadline, level, scratch);
    rank.fresh = false;
    const double gain = gain_at(rank, level);
    if (gain > rank.gain) {
      rank.gain = gain;
      best_level = level;
      best_price = rank.price;
      for (size_t i = 0; i < rank.count; ++i) scratch.best_shift[i] = variables_[rank.first + i].shift;
    }
    if (round + 1 == rounds) break;
    // Operations with slack are not what the deadline is about: their time is cheaper.
    set_level(rank, level);
    rank.schedule->slacks(rank.times, {}, deadline, scratch.slack);
    for (size_t i = 0; i < rank.count; ++i) {
      Variable& v = variables_[rank.first + i];
      const Curve& curve = curves_[static_cast<size_t>(v.curve)];
      const double own = rank.times.forward[i] + rank.times.backward[i], slack = scratch.slack[i];
      if (slack > 0.02 * own) {
        int more = 1;
        for (; more < 4; ++more) {
          const double longer = v.fixed_backward + v.scale * between(curve.backward, level + v.shift + more + 1);
          if (longer - rank.times.backward[i] > 0.4 * slack) break;
        }
        v.shift = std::min(v.shift + more, kLevels - 1);
      } else if (slack < 0.005 * own && v.shift > 0) {
        --v.shift;
      }
    }
  }
  for (size_t i = 0; i < rank.count; ++i) variables_[rank.first + i].shift = scratch.best_shift[i];
  rank.price = best_price;
  set_level(rank, best_level);
}

double PriceTuner::relax(double deadline, int rounds) {
  parallel_pieces(input_.pool, std::ssize(ranks_), [&](int64_t r, int thread) {
    relax_rank(ranks_[static_cast<size_t>(r)], deadline, rounds, scratch_[static_cast<size_t>(thread)]);
  });
  double gain = 0;
  for (const Rank& rank : ranks_) gain += rank.gain;
  return gain;
}

double PriceTuner::reach(double aim, double from) {
  constexpr double kEnough = 1 + 4e-4;
  double low = from, low_gain = relax(from, from == fastest_ ? kRounds : 1);
  if (low_gain >= aim) return low;
  double high = -1, high_gain = 0, deadline = low;
  constexpr int kDeadlines = 5;
  for (int step = 0; step < kDeadlines; ++step) {
    double price = 0;
    for (const Rank& rank : ranks_) price += rank.price;
    if (high < 0)
      deadline = price > 0 ? low + (1.0 + 0.1 * step) * (aim - low_gain) / price : base_makespan_;
    else
      deadline = low + (high - low) * std::min(0.95, 1.02 * (aim - low_gain) / (high_gain - low_gain));
    deadline = std::min(deadline, base_makespan_);
    // Who has slack changes little between deadlines: asked anew only once.
    const double gain = relax(deadline, step == 1 ? kRounds : 1);
    if (gain >= aim) {
      high = deadline;
      high_gain = gain;
      if (gain <= aim * kEnough) return deadline;
    } else {
      low = deadline;
      low_gain = gain;
      if (low >= base_makespan_) return low;
    }
  }
  // Beyond the last one that fell short.
  if (high < 0) high = std::min(base_makespan_, low * 1.01);
  if (deadline != high) relax(high, 1);
  return high;
}

double PriceTuner::write(Budgets& budgets, bool nearest) const {
  std::vector<double> gain(ranks_.size());
  parallel_pieces(input_.pool, std::ssize(ranks_), [&](int64_t r, int) {
    gain[static_cast<size_t>(r)] = write_rank(ranks_[static_cast<size_t>(r)], static_cast<int>(r), budgets, nearest);
  });
  double sum = 0;
  for (double one : gain) sum += one;
  return sum;
}

double PriceTuner::write_rank(const Rank& rank, int number, Budgets& budgets, bool nearest) const {
  const auto layers = static_cast<size_t>(input_.cost.layers());
  const auto& order = input_.orders[static_cast<size_t>(number)];
  double gain = 0;
  for (size_t i = 0; i < rank.count; ++i) {
    const Variable& v = variables_[rank.first + i];
    const Curve& curve = curves_[static_cast<size_t>(v.curve)];
    const double level = std::clamp(rank.level + v.shift, 0.0, static_cast<double>(kLevels - 1));
    const auto whole = std::min(static_cast<size_t>(level), static_cast<size_t>(kLevels - 2));
    const double part = level - static_cast<double>(whole);
    const double low_price = price_[curve.meant[whole]], high_price = price_[curve.meant[whole + 1]];
    const auto stage = static_cast<int>(i % static_cast<size_t>(stages_));
    const auto first = static_cast<size_t>(input_.cost.first_layer(stage));
    const auto last = first + static_cast<size_t>(input_.cost.stage_layers(stage));
    double owed = 0;  // pairs
    for (int member : input_.batches.members(input_.batches.first(number) + order[i / static_cast<size_t>(stages_)])) {
      const int64_t length = input_.sequences[static_cast<size_t>(member)].tokens;
      const auto weight = static_cast<double>(length);
      int32_t* own = budgets.data() + static_cast<size_t>(member) * layers;
      size_t a = 0, b = 0;
      double more = 0;
      std::span<const BudgetCurves::Vertex> vertices;
      for (size_t l = first; l < last; ++l) {
        if (l == first || !uniform_) {
          vertices = input_.curves.vertices(member, static_cast<int>(l));
          const auto worth = [&](size_t next, double price) {
            const double pairs =
                selected_pairs(length, vertices[next].budget) - selected_pairs(length, vertices[next - 1].budget);
            return weight * (vertices[next].coverage - vertices[next - 1].coverage) >= price * pairs;
          };
          a = 0;
          while (a + 1 < vertices.size() && worth(a + 1, low_price)) ++a;
          b = a;
          while (b + 1 < vertices.size() && worth(b + 1, high_price)) ++b;
          more = selected_pairs(length, vertices[b].budget) - selected_pairs(length, vertices[a].budget);
        }
        owed += part * more;
        const bool take = b > a && owed >= (nearest ? 0.5 : 1.0 - 1e-9) * more;
        if (take) owed -= more;
        const BudgetCurves::Vertex& vertex = vertices[take ? b : a];
        own[l] = vertex.budget;
        gain += weight * vertex.coverage;
      }
    }
  }
  return gain;
}

}  // namespace sb
