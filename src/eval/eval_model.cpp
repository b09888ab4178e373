#include "eval/eval_model.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "attention/cpu/sparse_attention.h"
#include "attention/factory/make_attention.h"
#include "attention/gpu/launch/head_dim_check.h"
#include "core/errors.h"
#include "core/files/regular_file.h"
#include "core/log.h"
#include "data/text/document_encoder.h"
#include "device/cuda.h"
#include "device/host_floats.h"
#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"

namespace sb {
namespace {

// generation_config.json is written by hand often enough: what is no token id is said and passed over.
std::vector<int32_t> read_stop_tokens(const std::filesystem::path& model, const ModelConfig& config) {
  std::vector<int32_t> tokens = config.eos_token_ids;
  const std::filesystem::path path = model / "generation_config.json";
  if (!std::filesystem::exists(path)) return tokens;
  const nlohmann::json json = nlohmann::json::parse(read_regular_file(path), nullptr, /*allow_exceptions=*/false);
  const nlohmann::json ids = json.is_object() ? json.value("eos_token_id", nlohmann::json()) : nlohmann::json();
  for (const nlohmann::json& id : ids.is_array() || ids.is_null() ? ids : nlohmann::json::array({ids})) {
    if (!id.is_number_integer() || id < 0 || id >= config.vocab_size) {
      log::warning("{}: eos_token_id: {} is not a token of the model", path.string(), id.dump());
      continue;
    }
    if (std::find(tokens.begin(), tokens.end(), id) == tokens.end()) tokens.push_back(id);
  }
  return tokens;
}

ModelConfig read_config_to_run(const EvalModelOptions& options) {
  const std::filesystem::path file = options.model / "config.json";
  ModelConfig config = read_model_config(file);
  if (options.device == DeviceKind::cuda)
    require_cuda_head_dim(config.head_dim, options.dtype, file.string(),
                          {.too_large = "use --device cpu", .not_in_bf16 = "use --precision float32"});
  return config;
}

MicroBatch one_sequence(std::span<const int32_t> tokens, const std::vector<int32_t>& labels) {
  MicroBatch batch;
  batch.tokens.assign(tokens.begin(), tokens.end());
  batch.labels = labels;
  batch.positions.resize(tokens.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.weights.assign(tokens.size(), 1.0f);
  batch.cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
  batch.sequence_ids = {0};
  return batch;
}

}  // namespace

EvalModel::EvalModel(const EvalModelOptions& options)
    : options_(options),
      config_(read_config_to_run(options)),
      pool_(options.threads > 0 ? options.threads : available_cores()),
      context_(options.device, pool_) {
  stop_tokens_ = read_stop_tokens(options.model, config_);
  CachedAttention::Options cache;
  prefill_ = make_prefill(cache);
  cache.prefill = prefill_.get();
  cache.layers = config_.layers;
  cache.sequences = options.batch;
  cache.capacity = options.max_tokens;
  cache.shape = {config_.heads, config_.kv_heads, config_.head_dim,
                 1.0f / std::sqrt(static_cast<float>(config_.head_dim))};
  cache.device = options.device;
  cache.dtype = options.dtype;
  cached_ = std::make_unique<CachedAttention>(cache);

  StageOptions stage;
  stage.device = options.device;
  stage.dtype = options.dtype;
  stage.last_layer = config_.layers;
  stage.max_micro_batch_tokens = std::max<int64_t>(options.max_tokens, options.batch);
  stage.max_sequence_length = options.max_tokens;
  stage.training = false;
  stage.with_values = options.dtype == DType::f32;
  if (options.device == DeviceKind::cuda) {
    constexpr int64_t kOutsideThePlan = int64_t{1} << 30;  // kernels, attention's work lists
    Stage::memory_plan(config_, stage, *cached_, pool_.threads())
        .check_fits(std::max<int64_t>(cuda::device_info().free_bytes - kOutsideThePlan, 1), "Lower --max-tokens.");
  }
  stage_ = std::make_unique<Stage>(config_, stage, *cached_, pool_.threads());
  std::optional<PeftAdapter> adapter;
  if (!options.adapter.empty()) adapter.emplace(options.adapter, config_);
  read_hf_weights(options.model, stage_->parameters(), [&](const FlatTensor& tensor, float* values) {
    if (adapter) adapter->merge(pool_, tensor.name, tensor.shape, values);
  });
}

std::unique_ptr<Attention> EvalModel::make_prefill(CachedAttention::Options& cache) {
  SparseAttention::Options sparse;
  sparse.layers = config_.layers;
  sparse.selection.pattern = SelectionPattern::dense;
  if (options_.attention) sparse.selection = *options_.attention;
  settle_score_channels(sparse.selection, config_.head_dim);
  sparse.coverage_rows = options_.coverage_rows;
  const SelectionConfig& selection = sparse.selection;
  std::unique_ptr<Attention> attention = make_attention(sparse, options_.device);
  selecting_ = dynamic_cast<SelectingAttention*>(attention.get());
  if (selection.pattern == SelectionPattern::dense) return attention;
  selecting_->use(options_.learned);
  knows_planes_ = !selection.judges_by_planes() || !options_.learned.planes.empty();
  if (selection.order == SelectionOrder::causal || selection.pattern == SelectionPattern::window) {
    cache.selecting = selecting_;
    cache.selection = selection;
    cache.learned = options_.learned;
  } else {
    log::warning(
        "attention.selection: lookahead is not possible for new tokens: prompts run as trained, new tokens attend to "
        "all keys");
  }
  return attention;
}

EvalModel::~EvalModel() = default;

bool EvalModel::has_tokenizer() const {
  return std::filesystem::exists(options_.model / "tokenizer.json");
}

const Tokenizer& EvalModel::tokenizer() {
  if (!tokenizer_) {
    SB_USER_CHECK(has_tokenizer(), "{}: has no tokenizer.json, which is needed for text; copy it there",
                  options_.model.string());
    tokenizer_ = Tokenizer::load((options_.model / "tokenizer.json").string());
  }
  return *tokenizer_;
}

void EvalModel::warn_beyond_reach(int64_t tokens) {
  const int64_t reach = longest_sequence(config_);
  if (warned_ || reach == 0 || tokens <= reach) return;
  warned_ = true;
  log::warning("a sequence has {} tokens, but the model supports {} (max_position_embeddings of {})", tokens, reach,
               (options_.model / "config.json").string());
}

void EvalModel::look_first(std::span<const int32_t> tokens) {
  if (selecting_ == nullptr || knows_planes_ || tokens.empty()) return;
  knows_planes_ = true;
  tokens = tokens.first(std::min<size_t>(tokens.size(), kFirstLookTokens));
  MicroBatch batch = one_sequence(tokens, std::vector<int32_t>(tokens.size(), kIgnoredLabel));
  // A budget of all its tokens makes a sequence dense.
  batch.budgets.assign(static_cast<size_t>(config_.layers), static_cast<int32_t>(tokens.size()));
  cached_->use({});
  stage_->forward(context_.exec(), batch, 0, {});
  const LearnedSelection learned = learn(options_.learned, selecting_->take_observations());
  selecting_->use(learned);
  cached_->learn(learned);
  log::info(
      "attention.score planes: {} has no statistics of them; they were chosen in a dense forward over the first {} "
      "tokens of the data",
      options_.model.string(), tokens.size());
}

EvalModel::Score EvalModel::score(const std::vector<int32_t>& tokens, const std::vector<int32_t>& labels) {
  SB_CHECK(tokens.size() == labels.size(), "{} tokens, {} labels", tokens.size(), labels.size());
  SB_USER_CHECK(std::ssize(tokens) <= options_.max_tokens, "a sequence has {} tokens, but --max-tokens is {}; raise it",
                tokens.size(), options_.max_tokens);
  if (tokens.empty()) return {};
  warn_beyond_reach(std::ssize(tokens));
  look_first(tokens);
  cached_->use({});
  if (selecting_ != nullptr) selecting_->take_report();  // what prompts counted
  stage_->forward(context_.exec(), one_sequence(tokens, labels), 0, {});
  const HostFloats losses(stage_->token_loss(0));
  return {stage_->loss(0),
          {losses.values().begin(), losses.values().end()},
          selecting_ == nullptr ? LayerAttention() : selecting_->take_report().total()};
}

std::vector<std::vector<int32_t>> EvalModel::generate(const std::vector<std::vector<int32_t>>& prompts,
                                                      const GenerationOptions& options,
                                                      const std::function<void(size_t, size_t)>& progress) {
  const int64_t most_new = std::min(options.max_new_tokens, options_.max_tokens);  // more is refused below
  for (const std::vector<int32_t>& prompt : prompts) warn_beyond_reach(std::ssize(prompt) + most_new);
  if (!prompts.empty()) look_first(*std::ranges::max_element(prompts, {}, &std::vector<int32_t>::size));
  Generator generator(*stage_, *cached_, options_.batch, options_.max_tokens);
  return generator.generate(context_.exec(), prompts, options, progress);
}

std::vector<std::vector<int32_t>> EvalModel::prompt_tokens(const std::vector<std::string>& prompts, int64_t room,
                                                           const AnswerOptions& how, std::vector<int32_t>& ends) {
  std::vector<std::vector<int32_t>> tokens;
  EncodeOptions encode;
  encode.add_special_tokens = true;
  const DocumentEncoder chats(tokenizer(), {});
  int64_t cut = 0;
  for (const std::string& prompt : prompts) {
    std::vector<int32_t>& ids = tokens.emplace_back();
    if (how.chat) {
      DocumentEncoder::Question question = chats.encode_question(prompt);
      ids = std::move(question.tokens);
      ends = {question.end};
    } else {
      ids = tokenizer().encode(prompt, encode);
    }
    if (!how.cut_middle || std::ssize(ids) <= room) continue;
    ids.erase(ids.begin() + (room + 1) / 2, ids.end() - room / 2);
    ++cut;
  }
  if (cut > 0)
    log::warning(
        "{} of {} prompts have more than {} tokens, and their middle was cut out; raise --max-tokens to keep them "
        "whole",
        cut, prompts.size(), room);
  return tokens;
}

std::vector<double> EvalModel::next(const std::string& prompt, const std::string& beginning,
                                    const std::vector<std::string>& continuations, const AnswerOptions& how) {
  const std::vector<int32_t> begun = tokenizer().encode(beginning);
  std::vector<int32_t> ends;
  const int64_t room = std::max<int64_t>(options_.max_tokens - std::ssize(begun), 1);
  std::vector<int32_t> tokens = prompt_tokens({prompt}, room, how, ends).front();
  tokens.insert(tokens.end(), begun.begin(), begun.end());
  SB_USER_CHECK(std::ssize(tokens) <= options_.max_tokens, "a prompt has {} tokens, but --max-tokens is {}; raise it",
                tokens.size(), options_.max_tokens);
  warn_beyond_reach(std::ssize(tokens));
  look_first(tokens);
  cached_->use({});
  stage_->forward(context_.exec(), one_sequence(tokens, std::vector<int32_t>(tokens.size(), kIgnoredLabel)), 0, {});
  Arena memory = make_arena("logits", config_.vocab_size * dtype_bytes(options_.dtype), options_.device);
  const TensorView row = memory.allocate(options_.dtype, {1, config_.vocab_size});
  stage_->logits(context_.exec(), 0, std::ssize(tokens) - 1, std::ssize(tokens), row);
  const HostFloats logits(row);
  const float top = *std::ranges::max_element(logits.values());
  double sum = 0;
  for (const float logit : logits.values()) sum += std::exp(static_cast<double>(logit - top));
  std::vector<double> likelihoods;
  for (const std::string& text : continuations) {
    const std::vector<int32_t> ids = tokenizer().encode(text);
    SB_CHECK(!ids.empty(), "an empty continuation");
    likelihoods.push_back(logits.values()[static_cast<size_t>(ids.front())] - top - std::log(sum));
  }
  return likelihoods;
}

std::vector<std::string> EvalModel::answer(const std::vector<std::string>& prompts, GenerationOptions options,
                                           const std::function<void(size_t, size_t)>& progress,
                                           const AnswerOptions& how) {
  const int64_t room = std::max<int64_t>(options_.max_tokens - options.max_new_tokens, 1);
  const std::vector<std::vector<int32_t>> tokens = prompt_tokens(prompts, room, how, options.stop_tokens);
  options.stop_tokens.insert(options.stop_tokens.end(), stop_tokens_.begin(), stop_tokens_.end());
  std::vector<std::string> texts;
  // Models have more ids than their tokenizer: the vocabulary is padded to a round number. An answer that holds such an
  // id is read without it, as by `transformers`.
  size_t without_text = 0;
  for (std::vector<int32_t>& ids : generate(tokens, options, progress)) {
    without_text += std::erase_if(ids, [&](int32_t id) { return !tokenizer().has(id); });
    texts.push_back(tokenizer().decode(ids, /*skip_special_tokens=*/true));
  }
  if (without_text > 0)
    log::warning("{} tokens of the answers are not in {} and were dropped: the model has {} ids, the tokenizer {}",
                 without_text, tokenizer().name(), config().vocab_size, tokenizer().vocab_size());
  return texts;
}

}  // namespace sb
