#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "model/model_config.h"
#include "plan/planner/balanced_planner.h"
#include "run/config/run_config.h"
#include "run/config/run_config_balance.h"
#include "train/packing.h"

namespace sb {

// The sizes that a profile is of.
ModelShape model_shape(const ModelConfig& model);
// The largest budget that tuning, or a plan that is used again, may give: what memory is planned for. 0: there is
// attention.budget alone.
int64_t largest_budget(const RunConfig& config);
// What the planner has to know about attention.
AttentionSpec attention_spec(const RunConfig& config);

// The run as plans are made for it: on the ranks of the cluster that it rehearses.
RunConfig planned_config(RunConfig config);
// balance.chunk: auto on GPUs with several stages: memory there is divided once, so that one size serves the whole run,
// the one by which the first batches are fastest in simulation, or whole sequences. Rank 0 settles it for all of
// `world` (null: one rank), the same when the run resumes, and says so. `longest`: of all sequences, those of the
// validation too, for which memory must do. Otherwise a size is chosen for every step, and nothing is done here.
void settle_chunk(RunConfig& config, const ModelConfig& model, const SequenceSource& source, int64_t longest,
                  Communicator* world);

// Warns where links were measured between other ranks than those that train. Collective; rank 0 warns.
void check_links(const RunConfig& config, Communicator& world);
// What is said of the links that predictions count with; empty: nothing is predicted, or there is one rank.
std::string links_text(const RunConfig& config, const ModelConfig& model);

// UserError when the profile is of another shape, of another recompute level or of other blocks.
Profile run_profile(const RunConfig& config, const ModelConfig& model);
std::unique_ptr<BalancedPlanner> make_balanced_planner(const RunConfig& run, const ModelConfig& model,
                                                       const PackingLimits& limits, const ReplayedSteps& steps = {},
                                                       int64_t first_step = 1);

// The planner that balance.* asks for.
std::unique_ptr<StepPlanner> make_step_planner(const RunConfig& config, const ModelConfig& model,
                                               const PackingLimits& limits, int64_t first_step);

}  // namespace sb
