#include "plan/latency/adapter_profile.h"

#include "core/errors.h"

namespace sb {
namespace {

OperationTable& table_of(Profile& profile, Operation operation) {
  return profile.tables[static_cast<size_t>(operation)];
}

void scale(OperationTable& table, double factor) {
  for (double& us : table.curve.y) us *= factor;
  for (double* rate : {&table.per_tile, &table.per_token, &table.per_score, &table.per_prefix}) *rate *= factor;
}

// table = own · table + forwards · forward. Both are along the tokens.
void mix(OperationTable& table, double own, const OperationTable& forward, double forwards) {
  for (size_t i = 0; i < table.curve.x.size(); ++i)
    table.curve.y[i] = own * table.curve.y[i] + forwards * forward.curve(table.curve.x[i]);
  table.per_tile = own * table.per_tile + forwards * forward.per_tile;
  table.per_token = own * table.per_token + forwards * forward.per_token;
  table.per_score = own * table.per_score + forwards * forward.per_score;
  table.per_prefix *= own;
}

}  // namespace

Profile with_adapters(Profile profile, int64_t rank) {
  SB_USER_CHECK(
      profile.lora_rank == 0 || profile.lora_rank == rank,
      "{}: was measured with LoRA adapters of rank {}, but {}; measure again with `sparsebalance profile --lora {}`",
      profile.name, profile.lora_rank,
      rank == 0 ? "the whole model is trained here" : fmt::format("the rank is {} here", rank), rank);
  if (profile.lora_rank == rank) return profile;
  const OperationTable forward = table_of(profile, Operation::linear_forward);
  OperationTable& backward = table_of(profile, Operation::linear_backward);
  SB_CHECK(forward.along == Coordinate::tokens && backward.along == Coordinate::tokens, "products along other work");
  // Two kinds of products make the backward, gradients of the inputs and of the weights, beside what is computed again.
  const bool again = profile.recompute != "none";
  const double share = static_cast<double>(profile.shape.adapter_parameters(rank)) /
                       static_cast<double>(profile.shape.layer_parameters());
  mix(backward, 0.5, forward, (again ? 0.5 : 0.0) + 3.0 * share);
  scale(table_of(profile, Operation::linear_forward), 1.0 + share);
  // The engine takes the head's gradients in the same pass as its loss: two of three products stay. The formulas have
  // them in the backward: one of two stays.
  const bool measured = profile.held_out.count > 0;
  scale(table_of(profile, measured ? Operation::head_forward : Operation::head_backward), measured ? 2.0 / 3.0 : 0.5);
  profile.lora_rank = rank;
  profile.adapters_measured = false;
  return profile;
}

}  // namespace sb
