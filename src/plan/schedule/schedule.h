#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace sb {

// What is left over of communication that runs beside an operation of a stage: `least` however long that takes;
// otherwise `all` less the share of the operation that something could hide behind.
struct Exposed {
  double least = 0, all = 0, hidden = 0;
  Exposed() = default;
  Exposed(double fixed) : least(fixed), all(fixed) {}
  Exposed(double least_us, double all_us, double hidden_share) : least(least_us), all(all_us), hidden(hidden_share) {}
  double beside(double operation) const { return std::max(least, all - hidden * operation); }
};

// Durations of one pipeline (one data-parallel rank), indexed [micro-batch · stages + stage], microseconds. With one
// stage this is plain data parallelism: forward and backward of each micro-batch in turn.
struct PipelineTimes {
  int stages = 1;
  int micro_batches = 0;
  std::vector<double> forward, backward;
  // Transfer of a micro-batch's activations into a stage from the one before (0 for the first stage), and of its
  // gradient from the one after (0 for the last; below 0 where that one sends it before its backward ends). Empty:
  // free. Transfers run beside the computation.
  std::vector<double> forward_transfer, backward_transfer;
  // Of every stage, beside its last backward: the gradients are summed over the replicas while that makes them; and
  // beside its first forward, which cannot begin before: the weights that the step before has updated are gathered
  // while it comes to them. Empty: free.
  std::vector<Exposed> tail, gather;

  size_t at(int micro_batch, int stage) const {
    return static_cast<size_t>(micro_batch) * static_cast<size_t>(stages) + static_cast<size_t>(stage);
  }
};

struct ScheduledOperation {
  int stage = 0;
  int position = 0;  // in the order of the micro-batches
  int micro_batch = 0;
  bool backward = false;
  bool critical = false;
  double start = 0, end = 0;
  double slack = 0;  // how much longer it may take without lengthening the makespan
};

struct ScheduleResult {
  double makespan = 0;
  double bubble_share = 0;                     // idle share of stages × makespan, reductions not counted as work
  std::vector<ScheduledOperation> operations;  // in an order that respects all dependencies
  std::vector<int> critical_path;              // indices of operations, first to last
};

// The operation graph of a pipeline. Forwards run in the order of the positions. Backwards run group by group, and
// inside a group in reverse: the pieces of a cut sequence are a group, anything else is a group of one. Before its
// backward j (counted from 0) a stage has run
//
//   min(micro-batches, max(end of the group of backward j, j + ahead) + warmup_depth · (stages - 1 - stage))
//
// forwards. With groups of one and ahead 1 that is 1F1B: some forwards, then one forward and one backward in turn, then
// the drain. Built once, evaluated many times in O(stages · micro-batches).
class Schedule {
 public:
  Schedule(int stages, int micro_batches, int warmup_depth = 1);  // 1F1B
  // `groups`: how many micro-batches each has, in order.
  Schedule(int stages, std::span<const int> groups, int ahead, int warmup_depth = 1);

  int stages() const { return stages_; }
  int micro_batches() const { return micro_batches_; }
  // The most micro-batches that a stage holds at once: forward has run, backward has not.
  int slots(int stage) const { return slots_[static_cast<size_t>(stage)]; }

  // End of the last operation (and tail) when position i runs micro-batch order[i]; empty order: as they stand.
  double makespan(const PipelineTimes& times, std::span<const int> order) const;
  // The makespans of kLanes variants of the durations at once, [(position · stages + stage) · kLanes + lane]; transfers
  // and tails are those of `times`, whose durations are not read. One pass costs little more than a single makespan.
  static constexpr int kLanes = 8;
  void makespans(const PipelineTimes& times, std::span<const double> forward, std::span<const double> backward,
                 std::vector<double>& scratch, std::span<double, kLanes> out) const;
  // The same where transfers differ, too, indexed like the durations; without any where they are empty.
  struct LaneTimes {
    std::vector<double> forward, backward, forward_transfer, backward_transfer;
    std::vector<Exposed> tail, gather;
  };
  void makespans(const LaneTimes& times, std::vector<double>& scratch, std::span<double, kLanes> out) const;
  // The same with everything in it.
  ScheduleResult analyze(const PipelineTimes& times, std::span<const int> order) const;

  // Longest path through all operations: fills `chain` with indices of nodes() and returns its length.
  double critical_path(const PipelineTimes& times, std::span<const int> order, std::vector<int>& chain) const;
  // The smaller slack of forward and backward of every (micro-batch, stage), against `deadline` instead of the
  // makespan.
  void slacks(const PipelineTimes& times, std::span<const int> order, double deadline, std::span<double> slack) const;

  struct Node {
    int32_t previous;    // node that runs before on the same stage; -1 - stage for the first
    int32_t dependency;  // node whose output it needs, or -1
    int32_t position;
    int16_t stage;
    bool backward;
  };
  const std::vector<Node>& nodes() const { return nodes_; }

 private:
  template <bool kTransfers>
  double run(const PipelineTimes& times, std::span<const int> order, double* end) const;
  // `end`: room() times; those of the nodes come after what their stages begin with.
  size_t room() const { return nodes_.size() + static_cast<size_t>(stages_); }
  double run(const PipelineTimes& times, std::span<const int> order, double* end) const;
  // When the weights of a stage are there for its first forward.
  double gathered(size_t stage, const PipelineTimes& times, std::span<const int> order) const;
  // What follows the last backward of a stage.
  double tail_of(size_t stage, const PipelineTimes& times, std::span<const int> order) const;
  void set_gathered(std::span<const double> forward, std::span<const Exposed> gather, double* end) const;
  void latest_ends(const double* end, std::span<const double> backward, std::span<const Exposed> tail,
                   std::span<double, kLanes> out) const;

  int stages_, micro_batches_;
  std::vector<Node> nodes_;         // topological
  std::vector<int> slots_;          // of every stage
  std::vector<int32_t> last_node_;  // of every stage
};

// The same graph serves every step, so the ones used last are kept.
std::shared_ptr<const Schedule> shared_schedule(int stages, int micro_batches, int warmup_depth);
std::shared_ptr<const Schedule> shared_schedule(int stages, std::span<const int> groups, int ahead, int warmup_depth);

}  // namespace sb
