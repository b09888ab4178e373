#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "plan/plan.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

// Budgets of one sequence over the layers as [budget, layers, budget, layers, …]: most layers are alike.
Json run_lengths(const PlannedMicroBatch& micro_batch, size_t sequence, int layers) {
  Json runs = Json::array();
  const size_t n = micro_batch.sequences.size();
  int count = 0;
  for (int l = 0; l < layers; ++l) {
    const int32_t budget = micro_batch.budgets[static_cast<size_t>(l) * n + sequence];
    ++count;
    if (l + 1 == layers || micro_batch.budgets[static_cast<size_t>(l + 1) * n + sequence] != budget) {
      runs.push_back(budget);
      runs.push_back(count);
      count = 0;
    }
  }
  return runs;
}

const Json& get(const Json& json, const char* key, const std::string& where) {
  const auto found = json.find(key);
  SB_USER_CHECK(json.is_object() && found != json.end(), "{}: `{}` is missing from the plan", where, key);
  return *found;
}

double number(const Json& json, const char* key, const std::string& where) {
  const Json& value = get(json, key, where);
  SB_USER_CHECK(value.is_number(), "{}: `{}` must be a number", where, key);
  return value.get<double>();
}

int64_t integer(const Json& value, const char* what, const std::string& where) {
  SB_USER_CHECK(value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX),
                "{}: {} must be an integer", where, what);
  return value.get<int64_t>();
}

const Json& list(const Json& json, const char* key, const std::string& where) {
  const Json& value = get(json, key, where);
  SB_USER_CHECK(value.is_array(), "{}: `{}` must be a list", where, key);
  return value;
}

std::vector<double> numbers(const Json& json, const char* key, const std::string& where) {
  std::vector<double> out;
  for (const Json& item : list(json, key, where)) {
    SB_USER_CHECK(item.is_number(), "{}: `{}` must hold numbers", where, key);
    out.push_back(item.get<double>());
  }
  return out;
}

// [layer · sequences + sequence] from the runs of every sequence.
std::vector<int32_t> read_budgets(const Json& lists, size_t sequences, int layers, const std::string& where) {
  if (lists.empty()) return {};
  SB_USER_CHECK(lists.size() == sequences, "{}: {} sequences and {} lists of budgets", where, sequences, lists.size());
  std::vector<int32_t> budgets(sequences * static_cast<size_t>(layers));
  for (size_t k = 0; k < sequences; ++k) {
    const Json& runs = lists[k];
    SB_USER_CHECK(runs.is_array() && runs.size() % 2 == 0, "{}: budgets must be pairs of budget and layers", where);
    int64_t layer = 0;
    for (size_t i = 0; i < runs.size(); i += 2) {
      const int64_t budget = integer(runs[i], "a budget", where),
                    count = integer(runs[i + 1], "a number of layers", where);
      SB_USER_CHECK(budget > 0 && budget <= INT32_MAX && count > 0 && count <= layers - layer,
                    "{}: budget {} over {} layers does not fit {} layers", where, budget, count, layers);
      for (int64_t end = layer + count; layer < end; ++layer)
        budgets[static_cast<size_t>(layer) * sequences + k] = static_cast<int32_t>(budget);
    }
    SB_USER_CHECK(layer == layers, "{}: budgets of {} layers, the plan has {}", where, layer, layers);
  }
  return budgets;
}

PlannedMicroBatch read_micro_batch(const Json& json, int layers, const std::string& where) {
  PlannedMicroBatch micro_batch;
  for (const Json& id : list(json, "sequences", where))
    micro_batch.sequences.push_back(integer(id, "a sequence id", where));
  const size_t n = micro_batch.sequences.size();
  SB_USER_CHECK(n > 0, "{}: a micro-batch is empty", where);
  micro_batch.tokens = integer(get(json, "tokens", where), "`tokens`", where);
  micro_batch.forward_us = numbers(json, "forward_us", where);
  micro_batch.backward_us = numbers(json, "backward_us", where);
  micro_batch.budgets = read_budgets(list(json, "budgets", where), n, layers, where);
  if (!json.contains("piece")) return micro_batch;
  const Json& piece = list(json, "piece", where);
  SB_USER_CHECK(piece.size() == 2 && n == 1, "{}: `piece` must be where it begins and ends in the only sequence",
                where);
  micro_batch.begin = integer(piece[0], "the begin of a piece", where);
  micro_batch.end = integer(piece[1], "the end of a piece", where);
  SB_USER_CHECK(micro_batch.begin >= 0 && micro_batch.end > micro_batch.begin &&
                    micro_batch.end - micro_batch.begin == micro_batch.tokens,
                "{}: a piece from {} to {} does not have {} tokens", where, micro_batch.begin, micro_batch.end,
                micro_batch.tokens);
  return micro_batch;
}

// A piece goes on where the one before it ends, and all of a sequence have the same budgets.
void check_piece(const PlannedMicroBatch* before, const PlannedMicroBatch& piece, const std::string& where) {
  if (piece.begin == 0) return;
  SB_USER_CHECK(before != nullptr && before->end == piece.begin && before->sequences == piece.sequences,
                "{}: sequence {} continues at {}, and the micro-batch before is not its piece that ends there", where,
                piece.sequences[0], piece.begin);
  SB_USER_CHECK(before->budgets == piece.budgets, "{}: the pieces of sequence {} have different budgets", where,
                piece.sequences[0]);
}

PlannedRank read_rank(const Json& json, int layers, const std::string& where) {
  PlannedRank rank;
  rank.makespan_us = number(json, "makespan_us", where);
  for (const Json& item : list(json, "micro_batches", where)) {
    PlannedMicroBatch micro_batch = read_micro_batch(item, layers, where);
    check_piece(rank.micro_batches.empty() ? nullptr : &rank.micro_batches.back(), micro_batch, where);
    rank.micro_batches.push_back(std::move(micro_batch));
  }
  const int64_t ahead = integer(get(json, "ahead", where), "`ahead`", where);
  SB_USER_CHECK(ahead == 1 || (ahead > 1 && ahead <= std::ssize(rank.micro_batches)),
                "{}: `ahead` {} must be from 1 to the rank's {} micro-batches", where, ahead,
                rank.micro_batches.size());
  rank.ahead = static_cast<int>(ahead);
  return rank;
}

}  // namespace

std::string write_plan(const Plan& plan) {
  Json ranks = Json::array();
  for (const PlannedRank& rank : plan.ranks) {
    Json micro_batches = Json::array();
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      Json budgets = Json::array();
      for (size_t k = 0; k < micro_batch.sequences.size() && !micro_batch.budgets.empty(); ++k)
        budgets.push_back(run_lengths(micro_batch, k, plan.layers));
      Json item = {{"sequences", micro_batch.sequences},
                   {"tokens", micro_batch.tokens},
                   {"budgets", budgets},
                   {"forward_us", micro_batch.forward_us},
                   {"backward_us", micro_batch.backward_us}};
      if (micro_batch.is_piece()) item["piece"] = {micro_batch.begin, micro_batch.end};
      micro_batches.push_back(std::move(item));
    }
    ranks.push_back({{"makespan_us", rank.makespan_us}, {"ahead", rank.ahead}, {"micro_batches", micro_batches}});
  }
  Json json = {{"version", Plan::kVersion},
               {"step", plan.step},
               {"layers", plan.layers},
               {"makespan_us", plan.makespan_us},
               {"lower_bound_us", plan.lower_bound_us},
               {"baseline_us", plan.baseline_us},
               {"imbalance", plan.imbalance},
               {"worker_imbalance", plan.worker_imbalance},
               {"bubble_share", plan.bubble_share},
               {"mean_coverage", plan.mean_coverage},
               {"min_coverage", plan.min_coverage},
               {"worst_loss", plan.worst_loss},
               {"base_coverage", plan.base_coverage},
               {"relaxed_bound", plan.relaxed_bound},
               {"ranks", ranks}};
  if (!plan.notes.empty()) json["notes"] = plan.notes;
  return json.dump();
}

Plan parse_plan(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SB_USER_CHECK(json.is_object(), "{}: is not a JSON object", where);
  const int64_t version = integer(get(json, "version", where), "`version`", where);
  if (version != Plan::kVersion)
    throw OtherPlanVersion(
        "{}: has plan version {}, but this program reads {}; continue with the release that wrote it, or move the file "
        "away (and remove balance.replay) to plan again",
        where, version, Plan::kVersion);
  Plan plan;
  plan.step = integer(get(json, "step", where), "`step`", where);
  const int64_t layers = integer(get(json, "layers", where), "`layers`", where);
  SB_USER_CHECK(layers > 0 && layers <= kMostLayers, "{}: `layers` must be from 1 to {}", where, kMostLayers);
  plan.layers = static_cast<int>(layers);
  plan.makespan_us = number(json, "makespan_us", where);
  plan.lower_bound_us = number(json, "lower_bound_us", where);
  plan.baseline_us = number(json, "baseline_us", where);
  plan.imbalance = number(json, "imbalance", where);
  plan.worker_imbalance = number(json, "worker_imbalance", where);
  plan.bubble_share = number(json, "bubble_share", where);
  plan.mean_coverage = number(json, "mean_coverage", where);
  plan.min_coverage = number(json, "min_coverage", where);
  plan.worst_loss = number(json, "worst_loss", where);
  plan.base_coverage = number(json, "base_coverage", where);
  plan.relaxed_bound = number(json, "relaxed_bound", where);
  if (json.contains("notes"))
    for (const Json& note : list(json, "notes", where)) {
      SB_USER_CHECK(note.is_string(), "{}: `notes` must hold words", where);
      plan.notes.push_back(note.get<std::string>());
    }
  for (const Json& rank : list(json, "ranks", where)) plan.ranks.push_back(read_rank(rank, plan.layers, where));
  return plan;
}

}  // namespace sb
