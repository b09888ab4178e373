#pragma once

#include <vector>

#include "model/decoder_layer.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "model/stage/stage.h"

namespace sb {

// The parameters of a stage and its layers. Declared without memory for the plan, with it for the run.
struct StageModel {
  ModelConfig rank;  // rank_config(); the layers keep a reference
  ParameterSet parameters, frozen;
  std::vector<DecoderLayer> layers;
  ParameterPlace embedding, final_norm, head;
  int first_layer_group = 0;  // of the parameters

  StageModel(const ModelConfig& config, const StageOptions& options);
};

// What a stage of such a model may be asked for.
void check_stage_options(const ModelConfig& config, const StageOptions& options);

}  // namespace sb
