#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "device/event.h"
#include "device/memory.h"
#include "model/micro_batch.h"
#include "model/stage/stage.h"
#include "model/stage/stage_memory.h"

namespace sb {

// A micro-batch's ids where the operations find them.
struct DeviceBatch {
  TensorView tokens, positions, labels, weights;
  TensorView sequences;  // the number of every token's sequence, where adapters drop elements of their input
};

// A micro-batch in flight.
struct Slot {
  enum class Holds { nothing, forward, evaluation };
  Holds holds = Holds::nothing;
  int64_t tokens = 0;
  int64_t rows = 0;              // of these, that this rank has between the products
  std::unique_ptr<Arena> arena;  // its part of the stage's activations
  // [rows, H]. Not the last stage: its output. Last stage: after forward the gradient of the last layer's output, after
  // evaluate the normed final hidden state.
  TensorView end;
  TensorView token_loss;
  // Host memory: what the loss writes, of each piece of the rows, and on CUDA the ids on their way to the device.
  HostMemory loss_memory, token_loss_memory, staging;
  std::unique_ptr<Arena> inputs;
  DeviceBatch ids;
  std::vector<int32_t> sequences;  // what ids.sequences shows on the host
  DeviceEvent uploaded, loss_ready;

  Slot(const StageOptions& options, const StageBytes& bytes, bool has_loss);

  LossSums* loss(int64_t piece) const { return static_cast<LossSums*>(loss_memory.data()) + piece; }
  // Empties the slot for a new micro-batch, whose ids are on their way to the device afterwards. `hidden`: the width of
  // the rows.
  void begin(const Exec& exec, const StageOptions& options, const MicroBatch& batch, bool has_loss, int64_t hidden);

 private:
  void upload_ids(const Exec& exec);
};

}  // namespace sb
