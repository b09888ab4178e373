#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/device/device_communicator.h"
#include "core/arena.h"
#include "model/stage/stage.h"
#include "parallel/weight_gather.h"

namespace sb {

// First layer of every stage and, last, the number of layers: equal shares, the remainder on the first stages (the last
// one has the loss besides).
std::vector<int> split_layers_evenly(int layers, int stages);

// Runs one stage of a pipeline: micro-batches of different sizes in the very order that plan/schedule/schedule.h
// predicts, 1F1B or, where sequences come in pieces, the pieces of a sequence forward in order and backward in reverse.
// Activations and gradients travel with their real size while other micro-batches are computed. A pipeline of one stage
// is forward and backward of each micro-batch, or of each sequence's pieces, in turn. Buffers lie on the stage's
// device, and so must those that the group takes.
class Pipeline {
 public:
  // `group`: the stages, in order, as this rank's part of each. The stage needs slots(...) slots. `max_rows`: of a
  // micro-batch, Stage::rows().
  Pipeline(Stage& stage, Communicator& group, int64_t max_rows);
  ~Pipeline();

  // Micro-batches that a stage holds at once, at most, when no sequence has more than `pieces` and forwards run at most
  // so far ahead.
  static int slots(int stage, int stages, int pieces = 1) { return pieces + stages - 1 - stage; }
  // The messages of this stage.
  DeviceLines lines() const;
  // What the constructor will allocate.
  static int64_t buffer_bytes(int stage, int stages, int64_t hidden_size, int64_t max_rows, DType dtype);

  enum class Pass { forward, backward, weights };  // weights: what backward has left out
  struct Operation {
    int micro_batch;
    Pass pass;
    // From its input to its output, and how much of that it waited for weights.
    std::chrono::steady_clock::time_point begin, end;
    std::chrono::nanoseconds waited{0};
    // The computation alone.
    int64_t nanoseconds() const {
      return (std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin) - waited).count();
    }
  };
  struct SourceLoss {
    double nll = 0;
    int64_t targets = 0;
  };
  struct Result {
    LossSums loss;                    // of all micro-batches, on the last stage; zero elsewhere
    std::vector<SourceLoss> sources;  // the same by MicroBatch::sources, as far as there are any
    std::vector<Operation> operations;
    bool stopped = false;  // asked to stop on the way
  };
  struct Order {
    int ahead = 1;  // how far forwards run ahead of backwards on the last stage of several (Schedule)
    // A stage sends the gradient of its input before it computes those of its weights (Stage::backward_input).
    bool split_backward = false;
  };
  struct Hooks {
    GradientsFinal gradients_final;  // of the last backward: nothing changes these gradients any more
    // Asked whenever nothing is in flight; true ends the run early. For a pipeline of one stage: others would wait.
    std::function<bool()> stop;
    // The waits for weights since it was asked last.
    std::function<std::vector<WeightGather::Wait>()> take_waits = {};
  };

  // All stages call it with the same micro-batches in the same order, the pieces of a sequence one after the other.
  Result train(const Exec& exec, std::span<const MicroBatch> batches, const Order& order, const Hooks& hooks);
  // Forward alone; the pieces of a sequence one after the other, each in a slot of its own.
  LossSums evaluate(const Exec& exec, const MicroBatch& batch, int slot = 0);

 private:
  // Two buffers for messages in one direction: one is filled or sent while the other is used.
  class Channel;
  class Timer;
  class Slots;
  void divide_stage(int slots, std::span<const MicroBatch> batches);

  Stage& stage_;
  Communicator& group_;
  int previous_, next_;  // stages; -1: none
  Arena arena_;
  std::unique_ptr<Channel> inputs_, output_gradients_, input_gradients_;
};

}  // namespace sb
