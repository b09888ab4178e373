#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "core/errors.h"
#include "plan/latency/profile_fit.h"
#include "python/bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

// Lengths of a micro-batch's sequences, microseconds of its forward and of its backward.
using TimedMicroBatch = std::tuple<std::vector<int64_t>, double, double>;

// What whole passes take. Work is summed over layers, so that rates are those of one layer.
struct PassRates {
  double fixed, per_token, per_pair, per_score;
  double operator()(const Work& work) const {
    return fixed + per_token * work.tokens + per_pair * work.pairs + per_score * work.scores;
  }
};

Work work_of_layers(const AttentionSpec& spec, int64_t layers, const std::vector<int64_t>& lengths) {
  Work sum;
  for (const int64_t length : lengths)
    for (int layer = 0; layer < layers; ++layer) sum += work_of(spec, length, spec.base_budget(length, layer));
  return sum;
}

PassRates fit_pass(const std::vector<LatencySample>& samples) {
  const OperationTable table = fit_table(Coordinate::pairs, samples, {.token = true, .score = true}, /*max_knots=*/1);
  const auto& [x, y] = table.curve;
  return {y[0], table.per_token, (y[1] - y[0]) / x[1], table.per_score};
}

OperationTable line(Coordinate along, double fixed, double rate) {
  constexpr double far = 1e6;
  OperationTable table;
  table.along = along;
  table.curve = {{0.0, far}, {fixed, fixed + far * rate}};
  return table;
}

void check(const TimedMicroBatch& micro_batch) {
  const auto& [lengths, forward, backward] = micro_batch;
  for (const int64_t length : lengths) SB_USER_CHECK(length > 0, "a sequence of {} tokens was timed", length);
  SB_USER_CHECK(!lengths.empty() && forward > 0 && backward > 0 && std::isfinite(forward + backward),
                "{} sequences took {} and {} us: nothing can be fitted to that", lengths.size(), forward, backward);
}

// The profile of a model whose whole passes were timed, embedding and loss with the layers: per token what does not
// depend on attention, per pair and score what does. Of the ways between workers it knows nothing.
std::string fit_profile(const std::string& model, const AttentionSpec& spec, const std::string& machine,
                        const std::string& date, const std::vector<TimedMicroBatch>& fitted,
                        const std::vector<TimedMicroBatch>& held_out) {
  Profile profile;
  profile.name = "measured";
  profile.machine = machine;
  profile.date = date;
  profile.recompute = "none";
  profile.shape = find_model_shape(model);
  const int64_t layers = profile.shape.layers;
  std::vector<LatencySample> forward, backward;
  SB_USER_CHECK(!fitted.empty(), "no micro-batch was timed");
  for (const TimedMicroBatch& micro_batch : fitted) {
    check(micro_batch);
    const Work work = work_of_layers(spec, layers, std::get<0>(micro_batch));
    forward.push_back({work, std::get<1>(micro_batch)});
    backward.push_back({work, std::get<2>(micro_batch)});
  }
  const PassRates ahead = fit_pass(forward), back = fit_pass(backward);
  const auto table = [&](Operation operation) -> OperationTable& {
    return profile.tables[static_cast<size_t>(operation)];
  };
  const auto each = static_cast<double>(layers);
  table(Operation::linear_forward) = line(Coordinate::tokens, ahead.fixed / each, ahead.per_token);
  table(Operation::linear_backward) = line(Coordinate::tokens, back.fixed / each, back.per_token);
  table(Operation::attention_forward) = line(Coordinate::pairs, 0, ahead.per_pair);
  table(Operation::attention_backward) = line(Coordinate::pairs, 0, back.per_pair);
  table(Operation::attention_backward).per_score = back.per_score;
  table(Operation::selection) = line(Coordinate::scores, 0, ahead.per_score);
  table(Operation::head_forward) = table(Operation::head_backward) = line(Coordinate::tokens, 0, 0);
  std::vector<double> errors;
  for (const TimedMicroBatch& micro_batch : held_out) {
    check(micro_batch);
    const auto& [lengths, forward_us, backward_us] = micro_batch;
    const Work work = work_of_layers(spec, layers, lengths);
    errors.push_back(std::abs((ahead(work) + back(work)) / (forward_us + backward_us) - 1));
  }
  profile.held_out = summarize_errors(errors);
  return write_profile(profile);
}

}  // namespace

void bind_fit_profile(nb::module_& module) {
  module.def("fit_profile", fit_profile, nb::kw_only(), "model"_a, "attention"_a, "machine"_a, "date"_a, "fitted"_a,
             "held_out"_a);
}

}  // namespace sb::python
