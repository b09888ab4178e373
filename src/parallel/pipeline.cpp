#include "parallel/pipeline.h"

#include <algorithm>

#include "device/event.h"
#include "device/memory.h"
#include "plan/schedule/schedule.h"

namespace sb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBuffers = 2;
enum Tag { kActivations = 0, kGradients = 1 };

// How many of the three channels a stage has: inputs and their gradients with the stage before, gradients of the
// outputs with the stage after.
int channels(int stage, int stages) {
  return (stage > 0 ? 2 : 0) + (stage + 1 < stages ? 1 : 0);
}

// How many micro-batches belong together: the pieces of a sequence do.
std::vector<int> group_sizes(std::span<const MicroBatch> batches) {
  std::vector<int> sizes;
  for (const MicroBatch& batch : batches) {
    if (batch.piece_begin > 0 && !sizes.empty())
      ++sizes.back();
    else
      sizes.push_back(1);
  }
  return sizes;
}

void add_by_source(const MicroBatch& batch, std::span<const float> token_loss,
                   std::vector<Pipeline::SourceLoss>& sources) {
  for (size_t i = 0; i < token_loss.size(); ++i) {
    if (batch.labels[i] == kIgnoredLabel) continue;
    const auto source = static_cast<size_t>(batch.sources[i]);
    if (source >= sources.size()) sources.resize(source + 1);
    sources[source].nll += token_loss[i];
    ++sources[source].targets;
  }
}

}  // namespace

std::vector<int> split_layers_evenly(int layers, int stages) {
  SB_USER_CHECK(stages <= layers, "parallel.pp {} is more than the model's {} layers: a stage would be empty; lower it",
                stages, layers);
  std::vector<int> first;
  for (int stage = 0; stage <= stages; ++stage)
    first.push_back(stage * (layers / stages) + std::min(stage, layers % stages));
  return first;
}

class Pipeline::Channel {
 public:
  Channel(Arena& arena, Communicator& group, int other, int tag, int64_t max_rows, int64_t hidden, DType dtype)
      : group_(group), other_(other), tag_(tag) {
    for (TensorView& buffer : buffers_) buffer = arena.allocate(dtype, {max_rows, hidden});
  }

  // A message of so many rows is asked for; up to two may be under way.
  void post_receive(int64_t rows) {
    const int slot = posted_++ % kBuffers;
    views_[slot] = buffers_[slot].rows(0, rows);
    requests_[slot] = group_.receive_async(views_[slot].raw(), views_[slot].bytes(), other_, tag_);
  }
  // The oldest one asked for; its buffer serves the next post_receive().
  TensorView receive() {
    const int slot = taken_++ % kBuffers;
    requests_[slot].wait();
    return views_[slot];
  }

  // Copies the rows and sends them; waits only while both buffers are still on their way.
  void send(const Exec& exec, TensorView rows) {
    const int slot = posted_++ % kBuffers;
    requests_[slot].wait();
    copy_tensor(exec, rows, buffers_[slot].rows(0, rows.dim(0)));
    requests_[slot] = group_.send_async(buffers_[slot].raw(), rows.bytes(), other_, tag_);
  }
  void finish() {
    for (CommRequest& request : requests_) request.wait();
    posted_ = taken_ = 0;
  }

 private:
  Communicator& group_;
  int other_, tag_;
  int posted_ = 0, taken_ = 0;
  std::array<TensorView, kBuffers> buffers_, views_;
  std::array<CommRequest, kBuffers> requests_;
};

// Which slot of the stage a micro-batch is in.
class Pipeline::Slots {
 public:
  Slots(int slots, size_t micro_batches) : slots_(slots), of_(micro_batches, -1) {
    for (int slot = slots; slot-- > 0;) free_.push_back(slot);
  }
  int take(int micro_batch) {
    const int slot = free_.back();
    free_.pop_back();
    return of_[static_cast<size_t>(micro_batch)] = slot;
  }
  bool all_free() const { return std::ssize(free_) == slots_; }
  int give_back(int micro_batch) {
    free_.push_back(of_[static_cast<size_t>(micro_batch)]);
    return free_.back();
  }

 private:
  int slots_;
  std::vector<int> free_, of_;
};

// When operations ran: by the clock on the CPU, by events on a device, where the host only queues them.
class Pipeline::Timer {
 public:
  Timer(const Exec& exec, const Hooks& hooks)
      : exec_(exec), take_waits_(hooks.take_waits), start_(Clock::now()), origin_(exec.device) {
    if (take_waits_) take_waits_();  // of what came before
    origin_.record(exec);
  }
  void begin() {
    begins_.emplace_back(exec_.device);
    begins_.back().record(exec_);
  }
  void end(int micro_batch, Pass pass) {
    ends_.emplace_back(exec_.device);
    ends_.back().record(exec_);
    kinds_.push_back({micro_batch, pass, {}, {}});
    waits_.push_back(take_waits_ ? take_waits_() : std::vector<WeightGather::Wait>());
  }
  // Waits for the last one.
  std::vector<Operation> operations() {
    if (!ends_.empty()) ends_.back().wait();
    const auto between = [](const DeviceEvent& begin, const DeviceEvent& end) {
      const std::chrono::duration<double, std::milli> time(DeviceEvent::milliseconds_between(begin, end));
      return std::chrono::duration_cast<Clock::duration>(time);
    };
    for (size_t i = 0; i < kinds_.size(); ++i) {
      kinds_[i].begin = start_ + between(origin_, begins_[i]);
      kinds_[i].end = start_ + between(origin_, ends_[i]);
      for (const WeightGather::Wait& wait : waits_[i]) kinds_[i].waited += between(wait.begin, wait.end);
    }
    return std::move(kinds_);
  }

 private:
  const Exec& exec_;
  const std::function<std::vector<WeightGather::Wait>()>& take_waits_;
  Clock::time_point start_;
  DeviceEvent origin_;
  std::vector<DeviceEvent> begins_, ends_;
  std::vector<Operation> kinds_;
  std::vector<std::vector<WeightGather::Wait>> waits_;  // of each
};

int64_t Pipeline::buffer_bytes(int stage, int stages, int64_t hidden_size, int64_t max_rows, DType dtype) {
  return channels(stage, stages) * kBuffers * Arena::rounded(max_rows * hidden_size * dtype_bytes(dtype));
}

Pipeline::Pipeline(Stage& stage, Communicator& group, int64_t max_rows)
    : stage_(stage),
      group_(group),
      previous_(group.rank() - 1),
      next_(group.rank() + 1 < group.size() ? group.rank() + 1 : -1),
      arena_(make_arena(
          "pipeline buffers",
          buffer_bytes(group.rank(), group.size(), stage.config().hidden_size, max_rows, stage.options().dtype),
          stage.options().device)) {
  SB_CHECK(stage.first() == (previous_ < 0) && stage.last() == (next_ < 0), "stage {} of {} has other layers",
           group.rank(), group.size());
  const auto channel = [&](int other, int tag) {
    return std::make_unique<Channel>(arena_, group_, other, tag, max_rows, stage.config().hidden_size,
                                     stage.options().dtype);
  };
  if (previous_ >= 0) {
    inputs_ = channel(previous_, kActivations);
    input_gradients_ = channel(previous_, kGradients);
  }
  if (next_ >= 0) output_gradients_ = channel(next_, kGradients);
}

Pipeline::~Pipeline() = default;

DeviceLines Pipeline::lines() const {
  DeviceLines lines;
  if (previous_ >= 0) {
    lines.to.push_back({previous_, kGradients});
    lines.from.push_back({previous_, kActivations});
  }
  if (next_ >= 0) {
    lines.to.push_back({next_, kActivations});
    lines.from.push_back({next_, kGradients});
  }
  return lines;
}

void Pipeline::divide_stage(int slots, std::span<const MicroBatch> batches) {
  if (stage_.options().kept_tokens == 0) {
    SB_CHECK(slots <= stage_.options().slots, "{} micro-batches in flight, planned for {}", slots,
             stage_.options().slots);
    return;
  }
  int64_t largest = 0;
  for (const MicroBatch& batch : batches) largest = std::max(largest, batch.size());
  stage_.divide(slots, largest);
}

Pipeline::Result Pipeline::train(const Exec& exec, std::span<const MicroBatch> batches, const Order& order,
                                 const Hooks& hooks) {
  const auto count = static_cast<int>(batches.size());
  const int stages = group_.size(), own = group_.rank();
  // One stage gains nothing by forwards ahead, and its pieces' keys lie in order if nothing comes in between.
  const int ahead = stages == 1 ? 1 : order.ahead;
  const auto schedule = shared_schedule(stages, group_sizes(batches), ahead, /*warmup_depth=*/1);
  divide_stage(schedule->slots(own), batches);
  std::vector<const Schedule::Node*> forwards, backwards;  // of this stage
  for (const Schedule::Node& node : schedule->nodes())
    if (node.stage == own) (node.backward ? backwards : forwards).push_back(&node);
  // Messages come in the order of the operations that need them.
  const auto expect = [&](Channel* channel, const std::vector<const Schedule::Node*>& nodes, int number) {
    if (channel && number < count)
      channel->post_receive(stage_.rows(batches[static_cast<size_t>(nodes[static_cast<size_t>(number)]->position)]));
  };
  // Nobody waits for the first stage.
  const bool split = order.split_backward && previous_ >= 0 && stage_.options().split_backward_tokens > 0;
  const GradientsFinal never;
  Result result;
  Timer timer(exec, hooks);
  for (int i = 0; i < kBuffers; ++i) {
    expect(inputs_.get(), forwards, i);
    expect(output_gradients_.get(), backwards, i);
  }
  Slots slots(schedule->slots(own), batches.size());
  std::vector<CommRequest> sent(batches.size());  // the micro-batch's output; in use until its backward
  int next_forward = kBuffers, next_backward = kBuffers, backwards_left = count;
  for (const Schedule::Node& node : schedule->nodes()) {
    if (node.stage != own) continue;
    const int i = node.position;
    const MicroBatch& batch = batches[static_cast<size_t>(i)];
    if (!node.backward) {
      if (hooks.stop && slots.all_free() && hooks.stop()) {
        result.stopped = true;
        return result;
      }
      const TensorView input = inputs_ ? inputs_->receive() : TensorView();
      timer.begin();
      const TensorView output = stage_.forward(exec, batch, slots.take(i), input);
      timer.end(i, Pass::forward);
      expect(inputs_.get(), forwards, next_forward++);
      if (next_ >= 0)
        sent[static_cast<size_t>(i)] = group_.send_async(output.raw(), output.bytes(), next_, kActivations);
    } else {
      sent[static_cast<size_t>(i)].wait();
      const TensorView gradient = output_gradients_ ? output_gradients_->receive() : TensorView();
      const int slot = slots.give_back(i);
      const GradientsFinal& final = --backwards_left == 0 ? hooks.gradients_final : never;
      timer.begin();
      const TensorView down = split ? stage_.backward_input(exec, batch, slot, gradient, final)
                                    : stage_.backward(exec, batch, slot, gradient, final);
      timer.end(i, Pass::backward);
      if (input_gradients_) input_gradients_->send(exec, down);
      if (split) {
        timer.begin();
        stage_.backward_weights(exec, batch, slot, final);
        timer.end(i, Pass::weights);
      }
      // Only now that backward is queued: a device does not wait for the host to read the loss.
      if (next_ < 0) {
        result.loss += stage_.loss(slot);
        if (!batch.sources.empty()) add_by_source(batch, stage_.host_token_loss(slot), result.sources);
      }
      expect(output_gradients_.get(), backwards, next_backward++);
    }
  }
  for (const auto& channel : {&inputs_, &output_gradients_, &input_gradients_})
    if (*channel) (*channel)->finish();
  result.operations = timer.operations();
  return result;
}

LossSums Pipeline::evaluate(const Exec& exec, const MicroBatch& batch, int slot) {
  if (slot == 0)
    divide_stage(
        batch.is_piece() ? static_cast<int>((batch.piece_length + batch.whole_size() - 1) / batch.whole_size()) : 1,
        std::span(&batch, 1));
  TensorView input;
  if (inputs_) {
    inputs_->post_receive(stage_.rows(batch));
    input = inputs_->receive();
  }
  const TensorView output = stage_.evaluate(exec, batch, slot, input);
  if (next_ < 0) return stage_.loss(slot);
  group_.send_async(output.raw(), output.bytes(), next_, kActivations).wait();
  return {};
}

}  // namespace sb
