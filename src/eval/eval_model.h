#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "data/tokenizer/tokenizer.h"
#include "device/context.h"
#include "eval/generation.h"
#include "model/stage/stage.h"

namespace sb {

struct EvalModelOptions {
  std::filesystem::path model;               // a Hugging Face directory
  std::filesystem::path adapter;             // a PEFT directory, put into the model's weights; empty: none
  std::optional<SelectionConfig> attention;  // what it was trained with; nothing: dense
  LearnedSelection learned;                  // what selection had learned then
  int coverage_rows = 0;                     // of every sequence and layer, on which the true coverage is measured
  int64_t max_tokens = 4096;                 // longest sequence, prompt and answer together
  int batch = 1;                             // sequences that are continued together
  int threads = 0;                           // 0: all cores
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::f32;  // of weights and activations: f32, or bf16 on CUDA
};

// How a text becomes a prompt.
struct AnswerOptions {
  bool chat = false;  // it is the user's message in a chat; the token that ends a message ends the answer, too
  // Those that leave no room for an answer lose their middle instead of being refused, and a warning counts them.
  bool cut_middle = false;
};

// A model to be asked questions: scores sequences and continues prompts. OutOfMemory with the plan when it does not fit
// on the GPU.
class EvalModel {
 public:
  explicit EvalModel(const EvalModelOptions& options);
  ~EvalModel();

  const ModelConfig& config() const { return config_; }
  // UserError when the directory has no tokenizer.json.
  const Tokenizer& tokenizer();
  bool has_tokenizer() const;
  ThreadPool& pool() { return pool_; }

  // Losses of one sequence's tokens against its labels (next token, or kIgnoredLabel).
  struct Score {
    LossSums sums;
    std::vector<float> token_loss;
    LayerAttention attention;  // of all layers together; dense attention on the CPU counts no pairs
  };
  Score score(const std::vector<int32_t>& tokens, const std::vector<int32_t>& labels);

  std::vector<std::vector<int32_t>> generate(const std::vector<std::vector<int32_t>>& prompts,
                                             const GenerationOptions& options,
                                             const std::function<void(size_t, size_t)>& progress = {});
  // Text in, text out; stops at stop_tokens().
  std::vector<std::string> answer(const std::vector<std::string>& prompts, GenerationOptions options,
                                  const std::function<void(size_t, size_t)>& progress = {},
                                  const AnswerOptions& how = {});
  // Log-probabilities of these texts as what comes next after a prompt and the answer's beginning, by the first token
  // of each.
  std::vector<double> next(const std::string& prompt, const std::string& beginning,
                           const std::vector<std::string>& continuations, const AnswerOptions& how = {});
  // The end tokens of config.json, and those that an instruct model has in generation_config.json beside them.
  const std::vector<int32_t>& stop_tokens() const { return stop_tokens_; }

 private:
  // Prompts as tokens, of at most `room` where they may be cut; `ends` becomes what ends an answer in a chat.
  std::vector<std::vector<int32_t>> prompt_tokens(const std::vector<std::string>& prompts, int64_t room,
                                                  const AnswerOptions& how, std::vector<int32_t>& ends);
  // Says once that sequences are longer than the model was made for; what comes of it may be what is to be seen.
  void warn_beyond_reach(int64_t tokens);
  // Where blocks are judged by planes and the model came without statistics of them: takes them from a dense forward
  // of these tokens, once, and says so.
  void look_first(std::span<const int32_t> tokens);
  // How prompts run; into `cache` what new tokens need of it.
  std::unique_ptr<Attention> make_prefill(CachedAttention::Options& cache);

  EvalModelOptions options_;
  ModelConfig config_;
  ThreadPool pool_;
  DeviceContext context_;
  std::unique_ptr<Attention> prefill_;
  SelectingAttention* selecting_ = nullptr;  // `prefill_`, where it selects
  bool knows_planes_ = true;                 // or does not need any
  std::unique_ptr<CachedAttention> cached_;
  std::unique_ptr<Stage> stage_;
  std::optional<Tokenizer> tokenizer_;
  std::vector<int32_t> stop_tokens_;
  bool warned_ = false;
};

}  // namespace sb
