#pragma once

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "attention/cpu/dense_attention.h"
#include "run/config/run_config.h"
#include "train/trainer.h"

namespace sb {

// A run small enough to train in milliseconds: two layers on chunk recall, with more added per test.
RunConfig tiny_run(const std::filesystem::path& output_dir, const std::vector<std::string>& overrides = {});

// A trainer of such a run with everything it is made of. What `Replace` names can be replaced.
class TinyTrainer {
 public:
  struct Replace {
    Attention* attention = nullptr;
    SequenceSource* source = nullptr;
    std::function<bool()> stop_requested = [] { return false; };
    SelectingAttention* sparse = nullptr;  // what `attention` forwards to
    const SequenceSource* validation = nullptr;
    StepPlanner* planner = nullptr;
    Communicator* world = nullptr;  // nullptr: this rank alone
  };
  explicit TinyTrainer(const RunConfig& config) : TinyTrainer(config, Replace()) {}
  TinyTrainer(const RunConfig& config, const Replace& replace);
  ~TinyTrainer();

  Trainer& operator*() { return *trainer_; }
  Trainer* operator->() { return trainer_.get(); }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  std::unique_ptr<Trainer> trainer_;
};

// Fixed sequences in a fixed order, again and again.
class ListSource final : public SequenceSource {
 public:
  explicit ListSource(std::vector<TokenSequence> sequences) : sequences_(std::move(sequences)) {}
  int64_t length(uint64_t position) const override;
  int64_t valid_targets(uint64_t position) const override;
  TokenSequence read(uint64_t position) const override;
  uint64_t size() const override { return sequences_.size(); }
  int64_t max_length() const override;

 private:
  std::vector<TokenSequence> sequences_;
};

// All parameters of a trainer, bit by bit.
std::vector<float> weights_of(Trainer& trainer);
std::vector<float> gradients_of(Trainer& trainer);
// The bytes of every tensor of a checkpoint (weights or adapters, and moments), whichever file it is in.
std::map<std::string, std::string> checkpoint_tensors(const std::filesystem::path& checkpoint);
// AdamW's moments in a checkpoint, by name.
std::vector<float> moments_of(const std::filesystem::path& checkpoint);

// What the UserError thrown by `action` says; "" when none is thrown.
std::string user_error_of(const std::function<void()>& action);

}  // namespace sb
