#include "plan/latency/profile_measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/errors.h"
#include "core/random.h"
#include "plan/latency/profile_fit.h"

namespace sb {
namespace {

constexpr double kTypical = 0.25;

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}

// Repeats until the middle half lies close together, or enough time is spent; the caller takes the lower quartile,
// which other work on the machine disturbs less than the median.
template <typename Run>
auto repeated(const Run& run, const MeasureOptions& options, const auto& total) {
  std::vector<decltype(run())> runs;
  std::vector<double> totals;
  double spent = total(run());  // caches, pages and the thread pool
  while (static_cast<int>(runs.size()) < options.max_repeats) {
    runs.push_back(run());
    totals.push_back(total(runs.back()));
    spent += totals.back();
    if (static_cast<int>(runs.size()) < options.least_runs) continue;
    if (static_cast<int>(runs.size()) >= options.min_repeats) {
      const double middle = quantile(totals, 0.5);
      if (quantile(totals, 0.75) - quantile(totals, 0.25) <= options.spread * middle) break;
    }
    if (spent > options.longest_us) break;
  }
  return runs;
}

double MeasuredTimes::*const kParts[kOperations] = {
    &MeasuredTimes::linear_forward,     &MeasuredTimes::linear_backward, &MeasuredTimes::attention_forward,
    &MeasuredTimes::attention_backward, &MeasuredTimes::selection,       &MeasuredTimes::head_forward,
    &MeasuredTimes::head_backward};

class Measurement {
 public:
  Measurement(const ModelShape& shape, const MeasureTarget& target, const MeasureOptions& options)
      : target_(target), options_(options), random_(options.seed) {
    profile_.shape = shape;
    profile_.prefix_measured = options.pieces;
    const AttentionSpec& spec = options.spec;
    profile_.attention = {spec.block, spec.query_block,    spec.pattern,
                          spec.score, spec.score_channels, spec.score_tokens};
  }

  Profile run() {
    std::vector<MeasuredShape> grid = first_grid();
    std::vector<MeasuredShape> refinements;
    for (int i = 0; i < options_.refinements; ++i) refinements.push_back(random_shape());
    const int wholes = options_.held_out + (options_.calibrate ? options_.refinements : 0);
    total_ = options_.passes * (static_cast<int>(grid.size() + refinements.size()) + wholes) + 2;
    measured_ = measure_all(grid);
    fit();
    const auto more = measure_all(refinements);
    // What the fit knows already would only weigh more.
    for (const auto& [shape, times] : more)
      if (std::abs(misfit(shape, times)) > 0.04) measured_.emplace_back(shape, times);
    fit();
    if (options_.calibrate) calibrate(refinements);
    links();
    hold_out();
    return profile_;
  }

 private:
  std::vector<MeasuredShape> first_grid() const {
    std::vector<MeasuredShape> grid;
    const AttentionSpec& spec = options_.spec;
    for (int64_t n = options_.min_tokens; n <= options_.max_tokens; n *= 2) {
      grid.push_back({{n}, {n}});
      for (int64_t k = spec.least_budget(); k < n; k *= 2)
        if (n > spec.dense_limit() || spec.dense_below >= 0) grid.push_back({{n}, {k}});
      // The same tokens in short sequences: few pairs, the same linear part.
      if (n >= 256) {
        grid.push_back({std::vector<int64_t>(8, n / 8), std::vector<int64_t>(8, n / 8)});
      }
      if (options_.pieces) add_pieces(n, grid);
    }
    return grid;
  }

  // The last quarter and the last eighth of a sequence: few queries on many keys.
  void add_pieces(int64_t length, std::vector<MeasuredShape>& grid) const {
    const int64_t edge = piece_edge(options_.spec), budget = options_.spec.base_budget(length);
    for (const int64_t part : {4, 8}) {
      const int64_t begin = (length - length / part) / edge * edge;
      if (begin > 0 && begin < length) grid.push_back({{length}, {budget}, {begin, length}});
    }
  }

  MeasuredShape random_shape() {
    MeasuredShape shape;
    const AttentionSpec& spec = options_.spec;
    const double low = std::log(2.0 * static_cast<double>(options_.min_tokens)),
                 high = std::log(static_cast<double>(options_.max_tokens));
    auto left = static_cast<int64_t>(std::exp(low + (high - low) * random_.uniform()));
    while (left > 0 && shape.tokens.size() < 8) {
      const int64_t n = shape.tokens.size() == 7
                            ? left
                            : std::max<int64_t>(16, static_cast<int64_t>(static_cast<double>(left) *
                                                                         (0.2 + 0.8 * random_.uniform())));
      const int64_t own = std::min(n, left);
      shape.tokens.push_back(own);
      const int64_t least = spec.least_budget();
      const bool dense = own <= spec.dense_limit() || own <= least || random_.below(3) == 0;
      shape.budgets.push_back(dense ? own
                                    : least + static_cast<int64_t>(random_.below(static_cast<uint64_t>(own - least))));
      left -= own;
    }
    return shape;
  }

  std::vector<std::pair<MeasuredShape, MeasuredTimes>> measure_all(const std::vector<MeasuredShape>& shapes) {
    std::vector<std::pair<MeasuredShape, MeasuredTimes>> all;
    for (const MeasuredShape& shape : shapes) all.emplace_back(shape, measure(shape));
    for (int pass = 1; pass < options_.passes; ++pass) {
      for (auto& [shape, times] : all) {
        const MeasuredTimes later = measure(shape);
        for (auto part : kParts) times.*part = std::min(times.*part, later.*part);
      }
    }
    return all;
  }

  MeasuredTimes measure(const MeasuredShape& shape) {
    report(fmt::format("{} tokens in {} sequence{}", shape.total_tokens(), shape.tokens.size(),
                       shape.tokens.size() == 1 ? "" : "s"));
    const auto total = [](const MeasuredTimes& times) {
      double sum = 0;
      for (auto part : kParts) sum += times.*part;
      return sum;
    };
    // Embedding and loss want shapes whose attention takes little of the time.
    const bool head = options_.head_everywhere || shape.tokens.size() > 1;
    const auto runs = repeated([&] { return target_.parts(shape, head); }, options_, total);
    MeasuredTimes middle;
    for (auto part : kParts) {
      std::vector<double> values;
      for (const MeasuredTimes& times : runs) values.push_back(times.*part);
      middle.*part = quantile(values, kTypical);
    }
    middle.pairs_share = 0;
    for (const MeasuredTimes& times : runs) middle.pairs_share += times.pairs_share / static_cast<double>(runs.size());
    if (options_.measured) options_.measured(shape, middle);
    return middle;
  }

  Work work_done(const MeasuredShape& shape, const MeasuredTimes& times) const {
    Work work = shape.work(options_.spec);
    work.pairs *= times.pairs_share;
    return work;
  }

  // Predicted ÷ measured - 1, of one layer and the head.
  double misfit(const MeasuredShape& shape, const MeasuredTimes& times) const {
    const Work work = work_done(shape, times);
    double predicted = 0, measured = 0;
    for (int part = 0; part < kOperations; ++part) {
      if (times.*kParts[part] == 0) continue;  // not measured, or nothing to do
      predicted += profile_.tables[static_cast<size_t>(part)](work);
      measured += times.*kParts[part];
    }
    return predicted / measured - 1;
  }

  // Selection is the difference of two forwards: beside the attention of a large budget too little to be told from
  // noise. And with a small one some tokens of a query block may add nothing, so that a GPU does not score them for
  // `topk`.
  // Budgets between half the base and the base count, of shorter sequences those above half of their length.
  bool tells_selection(const MeasuredShape& shape) const {
    const int64_t most = std::max(options_.spec.budget, options_.spec.least_budget());
    return shape.tokens.size() == 1 && shape.piece.end == 0 && shape.budgets[0] <= most &&
           2 * shape.budgets[0] > std::min(shape.tokens[0], most);
  }

  void fit() {
    const auto set = [&](Operation operation, Coordinate along, FitTerms terms) {
      std::vector<LatencySample> samples;
      for (const auto& [shape, times] : measured_) {
        if (operation == Operation::selection && !tells_selection(shape)) continue;
        const double us = times.*kParts[static_cast<size_t>(operation)];
        if (us > 0) samples.push_back({work_done(shape, times), us});
      }
      OperationTable& table = profile_.tables[static_cast<size_t>(operation)];
      if (samples.empty())
        table = {along, {{0.0, 1.0}, {0.0, 0.0}}, 0, 0, 0};
      else
        table = fit_table(along, samples, terms);
    };
    set(Operation::linear_forward, Coordinate::tokens, {});
    set(Operation::linear_backward, Coordinate::tokens, {});
    const FitTerms attention{true, true, false, true, options_.pieces};
    set(Operation::attention_forward, Coordinate::pairs, attention);
    set(Operation::attention_backward, Coordinate::pairs, attention);
    // Dense sequences have no scores, and selection then costs nothing.
    set(Operation::selection, Coordinate::scores, {false, false, false, false});
    set(Operation::head_forward, Coordinate::tokens, {});
    set(Operation::head_backward, Coordinate::tokens, {});
  }

  void links() {
    const auto series = [&](const std::function<double(int64_t)>& one, const char* what) {
      report(what);
      std::vector<std::pair<double, double>> samples;
      for (int64_t bytes = 1 << 12; bytes <= 1 << 24; bytes *= 8) {
        const auto runs = repeated([&] { return one(bytes); }, options_, [](double us) { return us; });
        samples.emplace_back(static_cast<double>(bytes), quantile(runs, kTypical));
      }
      return fit_link(samples);
    };
    if (!target_.transfer) return;
    Links& links = profile_.links;
    links.transfer_inside = links.transfer_between = series(target_.transfer, "point to point");
    links.reduce_inside = links.reduce_between = series(target_.reduction, "reduction");
    links.gather_inside = links.gather_between = links.transfer_inside;
  }

  // What the fit predicts plays no part in how often they are measured.
  std::vector<double> measure_wholes(const std::vector<MeasuredShape>& shapes, const char* what) {
    std::vector<double> measured(shapes.size(), std::numeric_limits<double>::infinity());
    for (int pass = 0; pass < options_.passes; ++pass) {
      for (size_t i = 0; i < shapes.size(); ++i) {
        const MeasuredShape& shape = shapes[i];
        report(fmt::format("{}: {} tokens in {} sequence{}", what, shape.total_tokens(), shape.tokens.size(),
                           shape.tokens.size() == 1 ? "" : "s"));
        const auto runs = repeated([&] { return target_.whole(shape); }, options_, [](double us) { return us; });
        measured[i] = std::min(measured[i], quantile(runs, kTypical));
      }
    }
    return measured;
  }

  double predicted_whole(const MeasuredShape& shape) const {
    const Work work = shape.work(options_.spec);
    double predicted = 0;
    for (int part = 0; part < kOperations; ++part) {
      const bool head = part >= static_cast<int>(Operation::head_forward);
      predicted += (head ? 1 : target_.layers) * profile_.tables[static_cast<size_t>(part)](work);
    }
    return predicted;
  }

  // What depends on tokens alone is scaled by a line over their logarithm, the one with which predictions come closest
  // to the measured wholes; shapes that spend their time there count most.
  void calibrate(const std::vector<MeasuredShape>& shapes) {
    if (shapes.size() < 2) return;
    const std::vector<double> measured = measure_wholes(shapes, "whole");
    double weights = 0, xs = 0, squares = 0, ys = 0, products = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Work work = shapes[i].work(options_.spec);
      double by_tokens = 0;
      for (int part = 0; part < kOperations; ++part) {
        const OperationTable& table = profile_.tables[static_cast<size_t>(part)];
        const bool head = part >= static_cast<int>(Operation::head_forward);
        if (table.along == Coordinate::tokens) by_tokens += (head ? 1 : target_.layers) * table(work);
      }
      const double scale = (measured[i] - (predicted_whole(shapes[i]) - by_tokens)) / by_tokens;
      const double x = std::log(work.tokens), weight = std::pow(by_tokens / measured[i], 2);
      weights += weight;
      xs += weight * x;
      squares += weight * x * x;
      ys += weight * scale;
      products += weight * x * scale;
    }
    const double spread = weights * squares - xs * xs;
    const double slope = spread > 0 ? (weights * products - xs * ys) / spread : 0, start = (ys - slope * xs) / weights;
    for (OperationTable& table : profile_.tables) {
      if (table.along != Coordinate::tokens) continue;
      for (size_t k = 0; k < table.curve.x.size(); ++k) {
        const double tokens = std::max(table.curve.x[k], static_cast<double>(options_.min_tokens));
        table.curve.y[k] *= std::clamp(start + slope * std::log(tokens), 0.5, 2.0);
        if (k > 0) table.curve.y[k] = std::max(table.curve.y[k], table.curve.y[k - 1]);
      }
    }
  }

  void hold_out() {
    std::vector<MeasuredShape> shapes;
    // The longest sequence at the base budget is always among them.
    const int64_t longest = options_.max_tokens - options_.max_tokens / 64;
    if (options_.held_out > 0) shapes.push_back({{longest}, {std::min(longest, options_.spec.budget)}});
    while (std::ssize(shapes) < options_.held_out) shapes.push_back(random_shape());
    const std::vector<double> measured = measure_wholes(shapes, "held out");
    std::vector<double> errors;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const double predicted = predicted_whole(shapes[i]);
      if (options_.checked) options_.checked(shapes[i], predicted, measured[i]);
      errors.push_back(std::abs(predicted / measured[i] - 1));
    }
    profile_.held_out = summarize_errors(errors);
  }

  void report(const std::string& what) {
    if (options_.progress) options_.progress(done_, total_, what);
    ++done_;
  }

  const MeasureTarget& target_;
  const MeasureOptions& options_;
  Random random_;
  Profile profile_;
  std::vector<std::pair<MeasuredShape, MeasuredTimes>> measured_;
  int done_ = 0, total_ = 0;
};

}  // namespace

Work MeasuredShape::work(const AttentionSpec& spec) const {
  Work sum;
  for (size_t i = 0; i < tokens.size(); ++i) sum += work_of(spec, tokens[i], piece, budgets[i]);
  return sum;
}

int64_t MeasuredShape::total_tokens() const {
  if (piece.end > 0) return piece.end - piece.begin;
  int64_t sum = 0;
  for (int64_t n : tokens) sum += n;
  return sum;
}

Profile measure_profile(const ModelShape& shape, const MeasureTarget& target, const MeasureOptions& options) {
  SB_USER_CHECK(options.max_tokens >= 256,
                "a profile needs micro-batches of at least 256 tokens, got {}; raise --max-tokens", options.max_tokens);
  return Measurement(shape, target, options).run();
}

}  // namespace sb
