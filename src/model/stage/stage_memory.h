#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "core/memory_plan.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "model/stage/stage.h"
#include "model/waiting/layer_inputs.h"
#include "model/waiting/piece_store.h"

namespace sb {

// One state for each (slot, layer) in training; without backward nothing has to outlive a layer.
int64_t attention_states(const StageOptions& options);

// What attention has to know of pieces of at most so many tokens.
Attention::PieceLimits piece_limits(const ModelConfig& config, const StageOptions& options, int64_t tokens);

// Bytes of every piece of a stage's memory, from which both the plan and the arenas are made.
struct StageBytes {
  int64_t weights, gradients, rounded_weights, frozen, kept_codes, activations, inputs, states, plans, call, rope_table,
      workspace, scratch;
  int64_t waiting_gradients = 0;  // what those of the products' weights are computed from, where they wait
  int64_t loss_pieces;            // of the rows, each of which has its own sums
  int64_t piece_layer;            // what attention keeps in every layer of a sequence in pieces
  LayerInputsPlan layer_inputs;
  PieceStorePlan pieces;

  StageBytes(const ModelConfig& model, const StageOptions& options, const ParameterSet& parameters,
             const ParameterSet& frozen_parameters, const Attention& attention, int threads);
};

// What the layers keep of a micro-batch of at most so many tokens.
int64_t kept_bytes(const ModelConfig& config, const StageOptions& options, int64_t tokens);
// What a slot for micro-batches of at most so many tokens holds.
int64_t slot_bytes(const ModelConfig& config, const StageOptions& options, int64_t tokens);

// The same item by item, under the names that people see.
MemoryPlan stage_memory_plan(const StageOptions& options, const StageBytes& bytes);

}  // namespace sb
