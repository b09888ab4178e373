#include "run/checkpoint_saver.h"

#include <chrono>
#include <utility>

#include "comm/first_rank.h"
#include "core/files/durable_file.h"
#include "core/log.h"
#include "core/memory_plan.h"
#include "parallel/grid.h"
#include "run/disk_room.h"

namespace sb {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

CheckpointSaver::CheckpointSaver(RunConfig config, ModelConfig model, Communicator& world, int64_t copy_bytes)
    : config_(std::move(config)), model_(std::move(model)), run_config_(print_run_config(config_)), world_(world) {
  if (copy_bytes == 0) return;
  copy_.resize(static_cast<size_t>(copy_bytes) / sizeof(float));  // now, not in the first save
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

void CheckpointSaver::save(const OwnTensors& own, const TrainState& state, const std::string& coverage) {
  wait();
  saving_ = {{config_.train.output_dir, state.step, checkpoint_bytes(config_, model_)}, state, coverage, {}, {}, false};
  try {
    begin(own);
  } catch (...) {
    saving_.reset();
    throw;
  }
}

void CheckpointSaver::begin(const OwnTensors& own) {
  Saving& saving = *saving_;
  std::filesystem::path temporary;
  on_first_rank(world_, [&] {
    make_room_for_checkpoint(config_, model_, saving.state.step - saving.state.skipped_in_row);
    temporary = begin_checkpoint(saving.place);
  });
  saving.temporary = broadcast_text(world_, temporary.string(), 0);
  if (!thread_.joinable()) {
    RankTensors tensors = own.tensors;
    for (std::vector<SafetensorsTensor>* kind : {&tensors.weights, &tensors.moments})
      for (SafetensorsTensor& tensor : *kind) tensor.fetch = [&own] { return own.next(nullptr); };
    write(saving, tensors);
    for (size_t i = tensors.weights.size() + tensors.moments.size(); i < own.rounds; ++i) own.next(nullptr);
    return wait();
  }
  saving.finishing = alone();
  start([this, &saving, tensors = copied(own)] {
    write(saving, tensors);
    if (alone()) complete(saving, saving.files);
  });
}

// Where they stay until the next save.
RankTensors CheckpointSaver::copied(const OwnTensors& own) {
  const Clock::time_point begin = Clock::now();
  RankTensors tensors = own.tensors;
  size_t elements = 0;
  for (const std::vector<SafetensorsTensor>* kind : {&tensors.weights, &tensors.moments})
    for (const SafetensorsTensor& tensor : *kind) elements += static_cast<size_t>(tensor.elements());
  SB_CHECK(elements <= copy_.size(), "{} elements to copy, room for {}", elements, copy_.size());
  float* place = copy_.data();
  for (std::vector<SafetensorsTensor>* kind : {&tensors.weights, &tensors.moments})
    for (SafetensorsTensor& tensor : *kind) {
      tensor.data = own.next(place);
      place += tensor.elements();
    }
  for (size_t i = tensors.weights.size() + tensors.moments.size(); i < own.rounds; ++i) own.next(nullptr);
  log::debug("copied {} of a checkpoint in {:.3f} s", format_bytes(static_cast<int64_t>(elements * sizeof(float))),
             seconds_since(begin));
  return tensors;
}

CheckpointContents CheckpointSaver::contents(const Saving& saving) const {
  return {model_, saving.state, run_config_, config_.model.path, config_.lora_config()};
}

void CheckpointSaver::write(Saving& saving, const RankTensors& tensors) const {
  const Clock::time_point begin = Clock::now();
  saving.files = write_tensors(saving.temporary, saving.place, tensors, contents(saving));
  int64_t bytes = 0;
  for (const TensorFile& file : saving.files) bytes += file.written.bytes;
  log::debug("wrote {} bytes of the checkpoint of step {} in {:.3f} s", bytes, saving.place.step, seconds_since(begin));
}

void CheckpointSaver::advance() {
  check();
  if (!saving_ || saving_->finishing) return;
  if (world_.all_reduce(int32_t{idle()}, ReduceOp::min) != 0) finish();
}

void CheckpointSaver::wait() {
  if (!saving_) return;
  // A disk may be slower than anybody waits for a message.
  try {
    if (!saving_->finishing) {
      on_all_ranks(world_, [this] { wait_for_task(); });
      finish();
    }
    on_first_rank(world_, [this] { wait_for_task(); });
  } catch (...) {
    saving_.reset();
    throw;
  }
  saving_.reset();
}

// All ranks have written their files.
void CheckpointSaver::finish() {
  const std::vector<std::string> texts = gather_texts(world_, pack_files(saving_->files), 0);
  saving_->finishing = true;
  if (world_.rank() != 0) return;
  std::vector<TensorFile> files;
  for (const std::string& text : texts)
    for (TensorFile& file : unpack_files(text)) files.push_back(std::move(file));
  start([this, files = std::move(files)] { complete(*saving_, files); });
}

void CheckpointSaver::complete(const Saving& saving, const std::vector<TensorFile>& files) const {
  const Clock::time_point begin = Clock::now();
  const TrainState& state = saving.state;
  const std::filesystem::path saved = finish_checkpoint(saving.temporary, saving.place, files, contents(saving));
  remove_old_checkpoints(config_.train.output_dir, state.step, config_.train.save_total_limit,
                         state.step - state.skipped_in_row);
  if (!saving.coverage.empty()) replace_file(config_.train.output_dir / "coverage.json", saving.coverage);
  log::debug("saved {}, completed in {:.3f} s", saved.string(), seconds_since(begin));
}

void CheckpointSaver::start(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  task_ = std::move(task);
  changed_.notify_all();
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

bool CheckpointSaver::idle() {
  std::lock_guard lock(mutex_);
  return !task_;
}

void CheckpointSaver::wait_for_task() {
  if (!thread_.joinable()) {
    if (const std::function<void()> task = std::exchange(task_, nullptr)) task();
    return;
  }
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
