#include "run/config/run_config.h"

#include <fmt/format.h>

#include "attention/select/selection_words.h"
#include "core/config/config.h"
#include "core/errors.h"
#include "plan/latency/workload.h"
#include "run/config/recompute_words.h"
#include "run/config/run_config_balance.h"
#include "run/config/run_config_check.h"
#include "run/config/run_config_lora.h"
#include "run/config/run_config_parallel.h"
#include "run/config/run_config_precision.h"

namespace sb {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;

constexpr const char* kReferenceIntroduction = R"(# Configuration

A run is described by one YAML file: `sparsebalance train run.yaml`. This page lists every option. It is generated with
`sparsebalance config --markdown`, from the table that the program itself parses with; a test checks that they agree.

- `--set section.option=value` overrides the file and may be repeated. The value is YAML: `--set optimizer.betas=[0.9,0.99]`,
  `--set 'data.synthetic={length: 512}'`. `--set data.synthetic=null` removes an optional section.
- `--print-config` prints every option with its value, as a file that can be loaded again, and exits; so does
  `sparsebalance config run.yaml`.
- Unknown keys, wrong types, values out of range and duplicate keys are errors that name the file and the line, and for an
  unknown key the nearest known one. YAML anchors, aliases and tags are not supported.
- Relative paths are relative to the current working directory.
- The sections `model.init`, `model.rope`, `data.synthetic`, `data.synthetic.curriculum` and `lora` are optional: each takes
  effect only if the file mentions it (`synthetic: {}` is enough to use all of its defaults).

Coming from `transformers` or Megatron:

| there | here |
| --- | --- |
| `per_device_train_batch_size` × `gradient_accumulation_steps` × GPUs, `--global-batch-size` | `batch.global_batch_size`: sequences per optimizer step, over all ranks; gradient accumulation follows from it |
| `--micro-batch-size` | `batch.micro_batch_sequences`, or a limit in tokens: `batch.micro_batch_tokens` |
| packing, `cutoff_len`, `--seq-length` | always packed, without padding; `data.max_sequence_length` is the longest sequence, `data.overlong` says what happens to longer documents |
| `gradient_checkpointing`, `--recompute-granularity` | `train.recompute` |
| `bf16: true`, `--bf16` | the default with `device: cuda`; `train.precision` also has `float32` and `fp8` |
| `lr_scheduler_type`, `--lr`, `--lr-decay-style` | `optimizer.schedule`, `optimizer.learning_rate`; schedules count optimizer steps, not samples |
| PEFT's `LoraConfig(r, lora_alpha, lora_dropout, target_modules, modules_to_save)` | `lora.rank`, `lora.alpha`, `lora.dropout`, `lora.targets`, `lora.train` |
| `resume_from_checkpoint` | run the same command again; `train.resume` can name a checkpoint |
| `--context-parallel-size`, `--pipeline-model-parallel-size`, `--tensor-model-parallel-size` | `parallel.cp`, `parallel.pp`, `parallel.tp` (always with sequence parallelism) |
| DeepSpeed's ZeRO | stage 1, always on, across `parallel.dp` × `parallel.cp` ranks |

## top level

)";

// The configuration as the table sees it: optional parts lie beside it, so that their options have an address whether
// the part is there or not.
struct FlatConfig {
  RunConfig config;

  bool has_init = false;
  ModelConfig init;
  bool has_rope = false;
  RopeConfig rope;
  bool has_synthetic = false;
  SyntheticOptions synthetic;
  int64_t synthetic_length = 2048;
  int64_t synthetic_min_length = 0;
  bool has_curriculum = false;
  CurriculumOptions curriculum;
  bool has_lora = false;
  LoraOptions lora;

  FlatConfig() {
    init.vocab_size = 1024;
    init.hidden_size = 128;
    init.intermediate_size = 256;
    init.layers = 2;
    init.heads = 4;
    init.kv_heads = 2;
    init.max_position_embeddings = 32768;
    init.tie_word_embeddings = true;
    rope.theta = 0.0;
  }

  explicit FlatConfig(const RunConfig& from) : FlatConfig() {
    config = from;
    has_init = from.model.init.has_value();
    if (has_init) {
      init = *from.model.init;
      if (init.family == ModelConfig::Family::qwen2) init.qkv_bias = false;  // fixed by the family, not an option
    }
    has_rope = from.model.rope.has_value();
    if (has_rope) rope = *from.model.rope;
    has_lora = from.lora.has_value();
    if (has_lora) lora = *from.lora;
    has_synthetic = from.data.synthetic.has_value();
    if (!has_synthetic) return;
    synthetic = *from.data.synthetic;
    has_curriculum = synthetic.curriculum.has_value();
    if (has_curriculum) curriculum = *synthetic.curriculum;
    synthetic_length = has_curriculum ? curriculum.end : synthetic.length.max;
    synthetic_min_length = synthetic.length.kind == LengthDistribution::Kind::fixed ? 0 : synthetic.length.min;
  }

  RunConfig finish(const OptionTable& table) const {
    RunConfig out = config;
    if (has_init) {
      SB_USER_CHECK(!init.qkv_bias || init.family != ModelConfig::Family::qwen2,
                    "{}: applies to llama and qwen3 only; qwen2 always has biases on q, k and v, so remove it",
                    table.label("model.init.attention_bias"));
      SB_USER_CHECK(init.head_dim > 0 || init.hidden_size % init.heads == 0,
                    "{}: {} heads do not divide hidden_size {}; set head_dim explicitly, or change one of the two",
                    table.label("model.init.num_attention_heads"), init.heads, init.hidden_size);
      // What the family fixes, as `transformers` has it.
      out.model.init = init;
      ModelConfig& model = *out.model.init;
      if (model.head_dim == 0) model.head_dim = static_cast<int>(model.hidden_size / model.heads);
      if (model.family == ModelConfig::Family::qwen2) model.qkv_bias = true;
      if (model.family != ModelConfig::Family::qwen2) model.output_bias = model.qkv_bias;
      model.qk_norm = model.family == ModelConfig::Family::qwen3;
    }
    if (has_rope) out.model.rope = rope;
    if (has_lora) out.lora = lora;
    if (has_synthetic) {
      SyntheticOptions task = synthetic;
      task.length = synthetic_min_length == 0 ? LengthDistribution::fixed(synthetic_length)
                                              : LengthDistribution::log_uniform(synthetic_min_length, synthetic_length);
      if (has_curriculum) {
        task.curriculum = curriculum;
        task.curriculum->end = synthetic_length;
      }
      out.data.synthetic = task;
    }
    return out;
  }
};

void add_weighted_paths(OptionTable& table, const std::string& name, std::vector<WeightedPath>* value,
                        const std::string& help) {
  table.add(
      name, "list of paths", "", help,
      [value](const ConfigValue& given, const std::string& label) {
        std::vector<WeightedPath> read;
        for (const ConfigValue& item : config_list(given, label)) {
          const std::string item_label = fmt::format("{}[{}]", label, read.size());
          WeightedPath path;
          if (item.kind == ConfigValue::Kind::map) {
            for (const auto& [key, entry] : item.entries) {
              if (key == "path")
                path.path = config_text(entry, item_label + ".path");
              else if (key == "weight")
                path.weight = config_number(entry, item_label + ".weight", 1e-6, 1e6);
              else
                throw UserError("{}: {}: unknown key '{}'; an entry has 'path' and 'weight'", entry.where, item_label,
                                key);
            }
          } else {
            path.path = config_text(item, item_label);
          }
          SB_USER_CHECK(!path.path.empty(), "{}: {}: the path is missing", item.where, item_label);
          read.push_back(std::move(path));
        }
        *value = std::move(read);
      },
      [value] {
        std::vector<std::string> items;
        for (const WeightedPath& path : *value)
          items.push_back(path.weight == 1.0
                              ? yaml_text(path.path.string())
                              : fmt::format("{{path: {}, weight: {}}}", yaml_text(path.path.string()), path.weight));
        return fmt::format("[{}]", fmt::join(items, ", "));
      });
}

void add_model(OptionTable& table, FlatConfig& flat) {
  table.section(
      "model",
      "The model to train: a Hugging Face checkpoint (`path`) or a new model (`init`). Set exactly one of them.");
  table.path(
      "model.path", &flat.config.model.path,
      "Hugging Face checkpoint: a directory with config.json and model.safetensors (or shards with their index)");
  table.choice<DType>("model.save_dtype", &flat.config.model.save_dtype,
                      {{"float32", DType::f32}, {"bfloat16", DType::bf16}},
                      "dtype of the weights exported for `transformers`; training checkpoints are always fp32");

  table.section("model.init", "A model trained from scratch. The keys are those of Hugging Face's config.json.",
                &flat.has_init);
  ModelConfig& init = flat.init;
  using Family = ModelConfig::Family;
  table.choice<Family>("model.init.model_type", &init.family,
                       {{"qwen2", Family::qwen2}, {"llama", Family::llama}, {"qwen3", Family::qwen3}},
                       "architecture; qwen2 has biases on q, k and v, qwen3 normalizes q and k");
  table.integer("model.init.vocab_size", &init.vocab_size, 2, 1 << 24, "vocabulary size");
  table.integer("model.init.hidden_size", &init.hidden_size, 8, 1 << 16, "hidden size (width of the residual stream)");
  table.integer("model.init.intermediate_size", &init.intermediate_size, 8, 1 << 18, "hidden size of the MLP");
  table.integer("model.init.num_hidden_layers", &init.layers, 1, 1024, "decoder layers");
  table.integer("model.init.num_attention_heads", &init.heads, 1, 1024, "query heads");
  table.integer("model.init.num_key_value_heads", &init.kv_heads, 1, 1024,
                "key/value heads (GQA); must divide num_attention_heads");
  table.integer("model.init.head_dim", &init.head_dim, 0, 256,
                "channels per head; 0: hidden_size / num_attention_heads");
  table.number("model.init.rms_norm_eps", &init.rms_norm_eps, 1e-12, 1e-2, "RMSNorm epsilon");
  table.number("model.init.initializer_range", &init.initializer_range, 0.0, 1.0,
               "standard deviation of the initial weights");
  table.number("model.init.rope_theta", &init.rope.theta, 1.0, 1e12, "RoPE base frequency");
  table.integer("model.init.max_position_embeddings", &init.max_position_embeddings, 1, kMaxTokens,
                "context length of the model, in tokens");
  table.flag("model.init.tie_word_embeddings", &init.tie_word_embeddings,
             "share one matrix between the embedding and the LM head");
  table.flag("model.init.attention_bias", &init.qkv_bias, "llama, qwen3: biases on the attention projections");

  table.section("model.rope",
                "Overrides the model's RoPE scaling, to extend its context; also written to the exported config.json.",
                &flat.has_rope);
  RopeConfig& rope = flat.rope;
  using Rope = RopeConfig::Type;
  table.choice<Rope>(
      "model.rope.type", &rope.type,
      {{"default", Rope::standard}, {"linear", Rope::linear}, {"llama3", Rope::llama3}, {"yarn", Rope::yarn}},
      "RoPE scaling method");
  table.number("model.rope.theta", &rope.theta, 0.0, 1e12, "RoPE base frequency; 0: the model's own");
  table.number("model.rope.factor", &rope.factor, 1.0, 1e6,
               "linear, llama3, yarn: factor by which the context is extended");
  table.integer("model.rope.original_max_position_embeddings", &rope.original_max_position_embeddings, 0, kMaxTokens,
                "llama3, yarn: context length before scaling; 0: the model's own");
  table.number("model.rope.low_freq_factor", &rope.low_freq_factor, 1e-3, 1e6,
               "llama3: as in rope_scaling of config.json");
  table.number("model.rope.high_freq_factor", &rope.high_freq_factor, 1e-3, 1e6,
               "llama3: as in rope_scaling of config.json");
  table.number("model.rope.beta_fast", &rope.beta_fast, 1e-3, 1e6, "yarn: as in rope_scaling of config.json");
  table.number("model.rope.beta_slow", &rope.beta_slow, 1e-3, 1e6, "yarn: as in rope_scaling of config.json");
  table.number("model.rope.attention_factor", &rope.attention_factor, 0.0, 1e3,
               "yarn: factor applied to cos and sin; 0: 0.1 ln(factor) + 1, or derived from mscale and mscale_all_dim");
  table.number("model.rope.mscale", &rope.mscale, 0.0, 1e3, "yarn: as in rope_scaling of config.json");
  table.number("model.rope.mscale_all_dim", &rope.mscale_all_dim, 0.0, 1e3, "yarn: as in rope_scaling of config.json");
  table.flag("model.rope.truncate", &rope.truncate, "yarn: round the correction range to whole channels");
}

void add_data(OptionTable& table, FlatConfig& flat) {
  DataOptions& data = flat.config.data;
  table.section("data",
                "The training data: token files (`train`) or a built-in task (`synthetic`). Set exactly one of them.");
  add_weighted_paths(table, "data.train", &data.train,
                     "token files: the common prefix of a .bin and an .idx file, an llm.c .bin, or a directory of MDS "
                     "shards (docs/data.md); `{path: ..., weight: 2}` draws each of its sequences twice as often (with "
                     "`mixture: tokens`: twice as many of its tokens)");
  add_weighted_paths(table, "data.validation", &data.validation, "token files for validation");
  table.integer("data.max_sequence_length", &data.max_sequence_length, 2, kMaxTokens,
                "maximum sequence length in tokens; with `synthetic` it defaults to `synthetic.length`");
  using Mixture = DataOptions::Mixture;
  table.choice<Mixture>("data.mixture", &data.mixture, {{"sequences", Mixture::sequences}, {"tokens", Mixture::tokens}},
                        "what the weights in `train` control; sequences: how often each sequence is drawn; tokens: "
                        "each entry's share of all training tokens");
  table.flag("data.shuffle", &data.shuffle,
             "shuffle every epoch anew, from the seed; false: keep the order of the files");
  table.choice<Overlong>("data.overlong", &data.overlong, {{"split", Overlong::split}, {"drop", Overlong::drop}},
                         "documents longer than max_sequence_length: split into several sequences, or drop");

  table.section("data.synthetic",
                "A task over token ids, generated on the fly (docs/data.md). Validation uses the same task with a "
                "different seed.",
                &flat.has_synthetic);
  SyntheticOptions& task = flat.synthetic;
  std::vector<std::pair<std::string, SyntheticTask>> tasks;
  for (const std::string_view name : synthetic_task_names())
    tasks.emplace_back(std::string(name), parse_synthetic_task(name));
  table.choice<SyntheticTask>("data.synthetic.task", &task.task, tasks, "the task to learn");
  table.integer("data.synthetic.vocab_size", &task.vocab_size, 2, 1 << 24,
                "number of token ids in use; at most the model's vocab_size");
  table.integer("data.synthetic.length", &flat.synthetic_length, 2, kMaxTokens,
                "sequence length in tokens; the maximum if lengths vary");
  table.integer("data.synthetic.min_length", &flat.synthetic_min_length, 0, kMaxTokens,
                "if above 0, lengths are log-uniform from here to `length`; 0: every sequence has `length` tokens");
  table.path("data.synthetic.lengths", &data.synthetic_lengths,
             "file with one length per line (as `sparsebalance data lengths` writes it) or a named pool; lengths are "
             "drawn from it uniformly and capped at `length`");
  table.integer("data.synthetic.chunk", &task.chunk, 2, 1 << 16, "chunk_recall: tokens per chunk");
  table.integer("data.synthetic.needles", &task.needles, 1, 1 << 16,
                "needle_multi_key, needle_multi_query: number of keys planted; associative_recall: number of pairs");
  table.integer("data.synthetic.values", &task.values, 1, 1 << 16,
                "needle_multi_value: number of values planted for the key");
  table.integer("data.synthetic.queries", &task.queries, 1, 1 << 16,
                "needle_multi_query, associative_recall: number of keys queried");
  table.integer("data.synthetic.value_tokens", &task.value_tokens, 1, 1 << 16,
                "needle tasks, associative_recall: tokens per value");
  table.integer("data.synthetic.hops", &task.hops, 1, 1 << 16,
                "variable_tracking: assignments per chain, after the first");
  table.integer("data.synthetic.chains", &task.chains, 1, 1 << 16,
                "variable_tracking: number of chains, one of which is queried");
  table.integer("data.synthetic.answers", &task.answers, 1, 1 << 16,
                "common_words, frequent_words: number of words to name");
  table.number("data.synthetic.depth", &task.depth, -1.0, 1.0,
               "needle_single: position of the needle, 0 (start) to 1 (end); negative: random");
  table.integer(
      "data.synthetic.min_distance", &task.min_distance, -1, kMaxTokens,
      "minimum distance, in tokens, from the question to anything that helps answer it; -1: the task's own choice");

  table.section("data.synthetic.curriculum",
                "Sequences start short and double in length as the model learns, up to `data.synthetic.length`.",
                &flat.has_curriculum);
  table.integer("data.synthetic.curriculum.start_length", &flat.curriculum.start, 2, kMaxTokens,
                "initial length, in tokens");
  table.number("data.synthetic.curriculum.threshold", &flat.curriculum.threshold, 0.0, 1.0,
               "the length doubles once the running accuracy exceeds this");
  table.number("data.synthetic.curriculum.smoothing", &flat.curriculum.smoothing, 0.0, 0.999,
               "decay of the running accuracy (an exponential moving average)");
  table.integer("data.synthetic.curriculum.min_observations", &flat.curriculum.min_observations, 1, 1 << 20,
                "minimum number of steps at a length before it may double");
}

void add_batch(OptionTable& table, FlatConfig& flat) {
  BatchOptions& batch = flat.config.batch;
  table.section("batch",
                "How many sequences make up a step, and how they are packed. Packing never changes the result (except "
                "for rounding with train.precision: fp8).");
  table.integer("batch.global_batch_size", &batch.global_batch_size, 1, 1 << 20,
                "sequences per optimizer step, over all ranks");
  table.integer("batch.micro_batch_sequences", &batch.micro_batch_sequences, 0, 1 << 20,
                "sequences per micro-batch; 0: as many as fit in micro_batch_tokens");
  table.integer("batch.micro_batch_tokens", &batch.micro_batch_tokens, 0, kMaxTokens,
                "maximum tokens per micro-batch; 0: max_sequence_length × max(1, micro_batch_sequences)");
  using Loss = BatchOptions::Loss;
  table.choice<Loss>(
      "batch.loss", &batch.loss, {{"token_mean", Loss::token_mean}, {"sequence_mean", Loss::sequence_mean}},
      "token_mean: every target token of the global batch has the same weight; sequence_mean: every sequence has");
}

void add_attention(OptionTable& table, FlatConfig& flat) {
  SelectionConfig& selection = flat.config.attention.selection;
  table.section(
      "attention",
      "Which keys a query attends to. With `pattern: dense` the other options of this section have no effect.");
  table.word("attention.pattern", &selection.pattern, kPatternWords,
             "dense: all earlier tokens of the sequence; the others select key blocks (docs/attention.md)");
  table.word("attention.selection", &selection.order, kOrderWords,
             "causal: each token selects with its own query; lookahead: a query block selects as a whole, so that "
             "later tokens influence what earlier ones see");
  table.word("attention.score", &selection.score, kScoreWords,
             "how key blocks are scored; planes: by their best-matching key, over the rotary planes that matter most; "
             "moments: by the mean and variance of their keys; mean: by the mean alone");
  table.integer("attention.score_channels", &selection.score_channels, 2, 1024,
                "score planes: channels per head used for scoring, an even number; at 32, heads with fewer channels "
                "use all of them");
  table.integer("attention.score_tokens", &selection.score_tokens, 0, 256,
                "score moments, mean: keys of a block that are scored together; smaller groups find single keys better "
                "but cost more (docs/attention.md); 0: the whole block");
  table.integer("attention.block", &selection.block, 64, 256, "tokens per key block: 64, 128 or 256");
  table.integer("attention.query_block", &selection.query_block, 1, 128,
                "tokens per query block, which share one list of key blocks; a power of two");
  table.integer("attention.budget", &selection.budget, 1, AttentionSpec::kMostBudget,
                "keys per query, averaged over a sequence");
  table.integer("attention.sink_blocks", &selection.sink_blocks, 0, 1024,
                "key blocks at the start of a sequence that are always selected");
  table.integer("attention.local_blocks", &selection.local_blocks, 0, 1024,
                "key blocks just before the query block that are always selected");
  table.integer("attention.step", &selection.step, 0, 64,
                "selection causal: key blocks that each token of a query block after the first may add");
  table.integer("attention.dense_below", &selection.dense_below, -1, kMaxTokens,
                "sequences of up to this many tokens use dense attention; -1: the budget");
  table.integers("attention.dense_layers", &selection.dense_layers, 0, 1 << 16, "layers that use dense attention");
  table.number("attention.coverage", &selection.coverage, 0.0, 1.0, "topp: attention mass to reach for each token");
  table.number("attention.vertical_coverage", &selection.vertical_coverage, 0.0, 1.0,
               "vertical_slash: attention mass to reach with columns");
  table.number("attention.slash_coverage", &selection.slash_coverage, 0.0, 1.0,
               "vertical_slash: attention mass to reach with diagonals");
  table.integer("attention.vertical_cap", &selection.vertical_cap, 0, kMaxTokens,
                "vertical_slash: maximum number of columns (tokens)");
  table.integer("attention.slash_cap", &selection.slash_cap, 0, kMaxTokens,
                "vertical_slash: maximum number of diagonals (blocks)");
  table.integer("attention.coverage_rows", &flat.config.attention.coverage_rows, 0, 1 << 16,
                "query rows per sequence and layer on which the true coverage is measured in every step; 0: none");
  table.path("attention.dump_index", &flat.config.attention.dump_index,
             "directory to save the block lists of one micro-batch in, one file per layer, for simulate --ring-index");
  table.integer("attention.dump_index_step", &flat.config.attention.dump_index_step, 1, kMaxTokens,
                "dump_index: earliest step whose micro-batch may be saved");
  table.flag("attention.layer_metrics", &flat.config.attention.layer_metrics,
             "log coverage and density of every layer to metrics.jsonl");
}

void add_optimizer(OptionTable& table, FlatConfig& flat) {
  OptimizerOptions& optimizer = flat.config.optimizer;
  table.section("optimizer", "AdamW. Weight decay applies to parameters with two or more dimensions.");
  table.number("optimizer.learning_rate", &optimizer.learning_rate, 0.0, 10.0, "peak learning rate");
  table.numbers("optimizer.betas", {&optimizer.beta1, &optimizer.beta2}, 0.0, 0.999999,
                "decay rates of the first and second moments");
  table.number("optimizer.eps", &optimizer.eps, 1e-30, 1.0, "added to the denominator");
  table.number("optimizer.weight_decay", &optimizer.weight_decay, 0.0, 10.0, "decoupled weight decay");
  table.number("optimizer.max_grad_norm", &optimizer.max_grad_norm, 0.0, 1e9,
               "clip gradients to this global norm; 0: no clipping");
  table.choice<DType>("optimizer.moments", &optimizer.moments, {{"float32", DType::f32}, {"bfloat16", DType::bf16}},
                      "dtype of AdamW's two moments; bfloat16 saves 4 bytes per parameter and is rounded "
                      "stochastically, so that the averages stay unbiased; may change when a run is resumed");
  using Schedule = OptimizerOptions::Schedule;
  table.choice<Schedule>("optimizer.schedule", &optimizer.schedule,
                         {{"constant", Schedule::constant},
                          {"linear", Schedule::linear},
                          {"cosine", Schedule::cosine},
                          {"warmup_stable_decay", Schedule::warmup_stable_decay}},
                         "learning rate schedule after the warmup");
  table.integer("optimizer.warmup_steps", &optimizer.warmup_steps, 0, OptionTable::kAny, "steps of linear warmup");
  table.number("optimizer.warmup_ratio", &optimizer.warmup_ratio, 0.0, 1.0,
               "if above 0: warmup as a fraction of all steps, instead of warmup_steps");
  table.integer("optimizer.decay_steps", &optimizer.decay_steps, 0, OptionTable::kAny,
                "warmup_stable_decay: number of final steps over which the learning rate decays linearly");
  table.number("optimizer.min_learning_rate_ratio", &optimizer.min_learning_rate_ratio, 0.0, 1.0,
               "linear, cosine, warmup_stable_decay: final learning rate, as a fraction of learning_rate");
}

void add_train(OptionTable& table, FlatConfig& flat) {
  TrainOptions& train = flat.config.train;
  table.section("train", "Length of the run, checkpoints, validation, logging, memory and precision.");
  table.integer("train.max_steps", &train.max_steps, 1, OptionTable::kAny, "optimizer steps");
  table.number("train.num_train_epochs", &train.num_train_epochs, 0.0, 1e6,
               "if above 0: passes over data.train, instead of max_steps; the last step may reach into the next pass");
  table.word("train.recompute", &train.recompute, kRecomputeWords,
             "what is recomputed in backward to save memory; none: nothing; attention: everything but attention; "
             "layer: the whole layer; chunk: the forward of every piece of a sequence but the last, keeping only their "
             "keys and values (needs parallel.pp: 1 and a number for balance.chunk). Never changes the result");
  table.integer("train.save_steps", &train.save_steps, 0, OptionTable::kAny,
                "steps between checkpoints; 0: only at the end");
  table.integer("train.save_total_limit", &train.save_total_limit, 0, OptionTable::kAny,
                "number of checkpoints to keep, the newest ones; 0: all");
  table.text("train.resume", &train.resume,
             "auto: from the newest intact checkpoint in output_dir, if any; never: start a new run; or the path of a "
             "checkpoint");
  table.path("train.output_dir", &train.output_dir, "directory for checkpoints, metrics and the trained model");
  table.integer("train.seed", &train.seed, 0, OptionTable::kAny,
                "random seed for initialization, data order and synthetic tasks");
  table.integer("train.validation_steps", &train.validation_steps, 0, OptionTable::kAny,
                "steps between validations; 0: only at the end, if there is validation data");
  table.integer("train.validation_sequences", &train.validation_sequences, 0, OptionTable::kAny,
                "maximum sequences per validation; 0: all with token files, none with a synthetic task");
  using ValidationAttention = TrainOptions::ValidationAttention;
  table.choice<ValidationAttention>(
      "train.validation_attention", &train.validation_attention,
      {{"as_trained", ValidationAttention::as_trained}, {"dense", ValidationAttention::dense}},
      "attention in validation; as_trained: as in training, at attention.budget; dense: all earlier tokens");
  table.integer("train.log_steps", &train.log_steps, 1, OptionTable::kAny, "steps between progress lines");
  table.flag("train.tensorboard", &train.tensorboard, "write TensorBoard event files next to metrics.jsonl");
  table.integer("train.threads", &train.threads, 0, 1024,
                "worker threads per rank; 0: all cores, divided among the ranks of a machine");
  table.integer("train.loss_chunk", &train.loss_chunk, 1, 1 << 20,
                "tokens per chunk of the LM head and cross-entropy; bounds the memory of the logits");
  table.integer("train.layer_chunk", &train.layer_chunk, 1, 1 << 20,
                "tokens per chunk of a layer's projections and MLP; bounds their temporary memory");
  table.integer("train.offload", &train.offload, -1, 1 << 16,
                "layers per pipeline stage whose input is kept in host memory until backward; -1: as many as it takes "
                "to fit the GPU (none on the CPU). Never changes the result");
  table.flag("train.offload_optimizer", &train.offload_optimizer,
             "device: cuda: keep the fp32 master weights and AdamW's moments, 12 bytes per parameter (8 with "
             "optimizer.moments: bfloat16), in host memory and stream them through the GPU. Never changes the result");
  add_precision_options(table, train);
  table.flag("train.deterministic", &train.deterministic,
             "device: cuda: bit-identical results in every run, with a somewhat slower attention backward; runs on the "
             "CPU are always deterministic");
  table.flag("train.trace", &train.trace,
             "write trace.json, for chrome://tracing or Perfetto; a resumed run writes trace-2.json and so on");
}

OptionTable run_options(FlatConfig& flat) {
  OptionTable table;
  table.choice<DeviceKind>("device", &flat.config.device, {{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}},
                           "where to train; cpu: computes in fp32; cuda: runs every rank on a GPU and computes in "
                           "bf16, with fp32 master weights, gradients and moments");
  add_model(table, flat);
  add_data(table, flat);
  add_batch(table, flat);
  add_attention(table, flat);
  add_balance_options(table, flat.config.balance);
  add_parallel_options(table, flat.config.parallel);
  add_optimizer(table, flat);
  add_lora_options(table, flat.lora, &flat.has_lora);
  add_train(table, flat);
  return table;
}

}  // namespace

RunConfig parse_run_config(const std::string& yaml, const std::string& name,
                           const std::vector<std::string>& overrides) {
  FlatConfig flat;
  OptionTable table = run_options(flat);
  table.load(yaml, name);
  for (const std::string& assignment : overrides) table.set(assignment);
  if (flat.has_synthetic && !table.given("data.max_sequence_length"))
    flat.config.data.max_sequence_length = flat.synthetic_length;
  RunConfig config = flat.finish(table);
  check_run_config(config, table, name);
  return config;
}

RunConfig load_run_config(const std::filesystem::path& path, const std::vector<std::string>& overrides) {
  return parse_run_config(read_config_file(path), path.string(), overrides);
}

std::string print_run_config(const RunConfig& config) {
  FlatConfig flat(config);
  return run_options(flat).yaml();
}

std::string run_config_markdown() {
  FlatConfig flat;
  return std::string(kReferenceIntroduction) + run_options(flat).markdown();
}

}  // namespace sb
