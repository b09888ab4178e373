#include "run/checkpoint_saver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/files/durable_file.h"
#include "core/log.h"
#include "run/disk_room.h"

namespace sb {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int64_t elements_of(std::span<const SafetensorsTensor> tensors) {
  int64_t elements = 0;
  for (const SafetensorsTensor& tensor : tensors) elements += tensor.elements();
  return elements;
}

// The same tensors with their values at `place`, which moves behind them.
std::vector<SafetensorsTensor> copied(std::span<const SafetensorsTensor> tensors, float*& place) {
  std::vector<SafetensorsTensor> copies;
  for (const SafetensorsTensor& tensor : tensors) {
    std::copy_n(tensor.data != nullptr ? tensor.data : tensor.fetch(), tensor.elements(), place);
    copies.push_back({tensor.name, tensor.shape, place});
    place += tensor.elements();
  }
  return copies;
}

}  // namespace

CheckpointSaver::CheckpointSaver(RunConfig config, ModelConfig model, Mode mode)
    : config_(std::move(config)), model_(std::move(model)) {
  if (mode == Mode::now) return;
  copy_.resize(static_cast<size_t>(checkpoint_bytes(config_, model_)) / sizeof(float));  // now, not in the first save
  thread_ = std::thread([this] { work(); });
}

CheckpointSaver::~CheckpointSaver() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  thread_.join();
  try {
    if (failure_) std::rethrow_exception(failure_);
  } catch (const std::exception& error) {
    log::error("{}", error.what());
  }
}

void CheckpointSaver::save(std::span<const SafetensorsTensor> weights, std::span<const SafetensorsTensor> moments,
                           const TrainState& state, const std::string& coverage) {
  if (!thread_.joinable()) return write(weights, moments, state, coverage);
  wait();
  const auto begin = std::chrono::steady_clock::now();
  copy_.resize(static_cast<size_t>(elements_of(weights) + elements_of(moments)));
  float* place = copy_.data();
  std::vector<SafetensorsTensor> own_weights = copied(weights, place), own_moments = copied(moments, place);
  log::debug("copied the checkpoint of step {} in {:.3f} s", state.step, seconds_since(begin));
  std::lock_guard lock(mutex_);
  task_ = [this, own_weights = std::move(own_weights), own_moments = std::move(own_moments), state, coverage] {
    write(own_weights, own_moments, state, coverage);
  };
  changed_.notify_all();
}

void CheckpointSaver::write(std::span<const SafetensorsTensor> weights, std::span<const SafetensorsTensor> moments,
                            const TrainState& state, const std::string& coverage) const {
  const auto begin = std::chrono::steady_clock::now();
  const std::filesystem::path& folder = config_.train.output_dir;
  const int64_t last_good = state.step - state.skipped_in_row;
  const std::string run_config = print_run_config(config_);
  make_room_for_checkpoint(config_, model_, last_good);
  const std::filesystem::path saved =
      save_checkpoint(folder, {model_, weights, moments, state, run_config, config_.model.path, config_.lora_config()});
  remove_old_checkpoints(folder, state.step, config_.train.save_total_limit, last_good);
  if (!coverage.empty()) replace_file(folder / "coverage.json", coverage);
  log::debug("saved {} in {:.3f} s", saved.string(), seconds_since(begin));
}

void CheckpointSaver::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return task_ || ends_; });
    if (!task_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task_();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failure_ = failure;
    task_ = nullptr;
    changed_.notify_all();
  }
}

void CheckpointSaver::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !task_; });
  rethrow_failure();
}

void CheckpointSaver::check() {
  std::lock_guard lock(mutex_);
  rethrow_failure();
}

void CheckpointSaver::rethrow_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace sb
