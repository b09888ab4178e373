#include "run/config/run_config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "core/errors.h"
#include "tests/run/scratch_directory.h"
#include "train/training_run.h"

namespace sb {
namespace {

// The least a run needs.
const std::string kSynthetic =
    "model: {init: {vocab_size: 64}}\n"
    "data: {synthetic: {vocab_size: 64, length: 256}}\n";
const std::string kFromCheckpoint =
    "model: {path: checkpoints/q}\n"
    "data: {train: [data/a]}\n";

RunConfig parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return parse_run_config(yaml, "run.yaml", overrides);
}

std::string error_of(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    parse(yaml, overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "(no UserError)";
}

TEST(RunConfig, DefaultsAndMinimalRuns) {
  const RunConfig config = parse(kSynthetic);
  EXPECT_TRUE(config.model.path.empty());
  ASSERT_TRUE(config.model.init.has_value());
  EXPECT_EQ(config.model.init->vocab_size, 64);
  EXPECT_FALSE(config.model.rope.has_value());
  ASSERT_TRUE(config.data.synthetic.has_value());
  EXPECT_EQ(config.data.synthetic->length.max, 256);
  EXPECT_FALSE(config.data.synthetic->curriculum.has_value());
  EXPECT_EQ(config.data.max_sequence_length, 256) << "follows the task where not given";
  EXPECT_EQ(config.optimizer.learning_rate, OptimizerOptions{}.learning_rate);
  EXPECT_EQ(config.attention.selection.pattern, SelectionPattern::dense);

  const RunConfig other = parse(kFromCheckpoint);
  EXPECT_EQ(other.model.path, "checkpoints/q");
  EXPECT_FALSE(other.model.init.has_value());
  ASSERT_EQ(other.data.train.size(), 1u);
  EXPECT_EQ(other.data.train[0], (WeightedPath{"data/a", 1.0}));
}

TEST(RunConfig, ReadsEverySection) {
  const RunConfig config = parse(
      "device: cpu\n"
      "model:\n"
      "  path: q\n"
      "  save_dtype: bfloat16\n"
      "  rope: { type: yarn, factor: 16, original_max_position_embeddings: 32768, beta_fast: 16 }\n"
      "data:\n"
      "  train: [data/long, {path: data/more, weight: 2.5}]\n"
      "  validation: [data/val]\n"
      "  max_sequence_length: 65536\n"
      "  shuffle: false\n"
      "  overlong: drop\n"
      "batch: { global_batch_size: 8, micro_batch_sequences: 2, micro_batch_tokens: 65536, loss: sequence_mean }\n"
      "attention: { pattern: dense }\n"
      "balance: { batching: in_order }\n"
      "parallel: { dp: 1, pp: 1, cp: 1 }\n"
      "optimizer: { learning_rate: 1.0e-5, betas: [0.8, 0.9], eps: 1.0e-7, weight_decay: 0.2, max_grad_norm: 2.0,\n"
      "             moments: bfloat16, schedule: warmup_stable_decay, warmup_steps: 100, decay_steps: 50, "
      "min_learning_rate_ratio: 0.1 }\n"
      "train: { max_steps: 1234, recompute: layer, save_steps: 7, save_total_limit: 2, resume: never,\n"
      "         output_dir: runs/first, seed: 9, validation_steps: 5, validation_sequences: 6, log_steps: 3,\n"
      "         tensorboard: false, threads: 4, loss_chunk: 512, layer_chunk: 4096, offload: 3, trace: true,\n"
      "         precision: float32, deterministic: true }\n");
  EXPECT_EQ(config.model.save_dtype, DType::bf16);
  ASSERT_TRUE(config.model.rope.has_value());
  EXPECT_EQ(config.model.rope->type, RopeConfig::Type::yarn);
  EXPECT_EQ(config.model.rope->factor, 16.0);
  EXPECT_EQ(config.model.rope->original_max_position_embeddings, 32768);
  EXPECT_EQ(config.model.rope->beta_fast, 16.0);
  EXPECT_EQ(config.model.rope->theta, 0.0) << "the checkpoint's";
  EXPECT_EQ(config.data.train[1], (WeightedPath{"data/more", 2.5}));
  EXPECT_EQ(config.data.validation.size(), 1u);
  EXPECT_EQ(config.data.max_sequence_length, 65536);
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.data.overlong, Overlong::drop);
  EXPECT_EQ(config.batch.global_batch_size, 8);
  EXPECT_EQ(config.batch.micro_batch_sequences, 2);
  EXPECT_EQ(config.batch.micro_batch_tokens, 65536);
  EXPECT_EQ(config.batch.loss, BatchOptions::Loss::sequence_mean);
  EXPECT_EQ(config.optimizer.beta1, 0.8);
  EXPECT_EQ(config.optimizer.beta2, 0.9);
  EXPECT_EQ(config.optimizer.eps, 1e-7);
  EXPECT_EQ(config.optimizer.weight_decay, 0.2);
  EXPECT_EQ(config.optimizer.max_grad_norm, 2.0);
  EXPECT_EQ(config.optimizer.moments, DType::bf16);
  EXPECT_EQ(config.optimizer.schedule, OptimizerOptions::Schedule::warmup_stable_decay);
  EXPECT_EQ(config.optimizer.warmup_steps, 100);
  EXPECT_EQ(config.optimizer.decay_steps, 50);
  EXPECT_EQ(config.optimizer.min_learning_rate_ratio, 0.1);
  EXPECT_EQ(config.train.max_steps, 1234);
  EXPECT_EQ(config.train.recompute, Recompute::layer);
  EXPECT_EQ(config.train.save_steps, 7);
  EXPECT_EQ(config.train.save_total_limit, 2);
  EXPECT_EQ(config.train.resume, "never");
  EXPECT_EQ(config.train.output_dir, "runs/first");
  EXPECT_EQ(config.train.seed, 9u);
  EXPECT_EQ(config.train.validation_steps, 5);
  EXPECT_EQ(config.train.validation_sequences, 6);
  EXPECT_EQ(config.train.log_steps, 3);
  EXPECT_FALSE(config.train.tensorboard);
  EXPECT_EQ(config.train.threads, 4);
  EXPECT_EQ(config.train.loss_chunk, 512);
  EXPECT_EQ(config.train.layer_chunk, 4096);
  EXPECT_EQ(config.train.offload, 3);
  EXPECT_EQ(config.train.precision, TrainOptions::Precision::float32);
  EXPECT_TRUE(config.train.deterministic);
  EXPECT_TRUE(config.train.trace);
}

TEST(RunConfig, ModelFromScratch) {
  const auto init = [](const std::string& options) { return *parse(kSynthetic, {"model.init=" + options}).model.init; };
  const ModelConfig qwen2 =
      init("{model_type: qwen2, hidden_size: 96, num_attention_heads: 3, num_key_value_heads: 1}");
  EXPECT_EQ(qwen2.head_dim, 32);
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  const ModelConfig llama = init("{model_type: llama, head_dim: 64, tie_word_embeddings: false, rope_theta: 500000}");
  EXPECT_EQ(llama.head_dim, 64);
  EXPECT_FALSE(llama.qkv_bias);
  EXPECT_FALSE(llama.tie_word_embeddings);
  EXPECT_EQ(llama.rope.theta, 500000.0);
  const ModelConfig biased = init("{model_type: llama, attention_bias: true}");
  EXPECT_TRUE(biased.qkv_bias);
  EXPECT_TRUE(biased.output_bias);
  EXPECT_TRUE(init("{model_type: qwen3}").qk_norm);

  EXPECT_EQ(
      error_of(kSynthetic, {"model.init.num_key_value_heads=3"}),
      "--set: model.init.num_key_value_heads: 3 key/value heads do not divide 4 query heads; change one of the two");
  EXPECT_EQ(error_of(kSynthetic, {"model.init.num_attention_heads=6"}),
            "--set: model.init.num_attention_heads: 6 heads do not divide hidden_size 128; set head_dim explicitly, or "
            "change one of the two");
  EXPECT_NE(error_of(kSynthetic, {"model.init.head_dim=33"}).find("must be even"), std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"model.init.attention_bias=true"}).find("applies to llama and qwen3 only"),
            std::string::npos);
  EXPECT_NE(error_of("model: {init: {hidden: 3}}\n").find("did you mean 'model.init.hidden_size'?"), std::string::npos);
  const std::pair<const char*, const char*> words[] = {
      {"train: {epochs: 3}\n", "did you mean 'train.num_train_epochs'?"},
      {"train: {steps: 3}\n", "'train' has max_steps, "},  // several hold it
      {"optimizer: {lr: 1}\n", "'optimizer' has learning_rate, betas, "},
      {"train: {learnig_rate: 1}\n", "did you mean 'optimizer.learning_rate'?"},
  };
  for (const auto& [text, message] : words)
    EXPECT_NE(error_of(text).find(message), std::string::npos) << error_of(text);
}

TEST(RunConfig, SyntheticLengthsAndCurriculum) {
  const RunConfig ranged = parse(kSynthetic, {"data.synthetic.min_length=32"});
  EXPECT_EQ(ranged.data.synthetic->length.kind, LengthDistribution::Kind::log_uniform);
  EXPECT_EQ(ranged.data.synthetic->length.min, 32);
  EXPECT_EQ(ranged.data.synthetic->length.max, 256);
  const RunConfig grown = parse(kSynthetic, {"data.synthetic.curriculum={start_length: 16, threshold: 0.7}"});
  ASSERT_TRUE(grown.data.synthetic->curriculum.has_value());
  EXPECT_EQ(grown.data.synthetic->curriculum->start, 16);
  EXPECT_EQ(grown.data.synthetic->curriculum->end, 256);
  EXPECT_EQ(grown.data.synthetic->curriculum->threshold, 0.7);

  EXPECT_NE(error_of(kSynthetic, {"data.synthetic.min_length=257"}).find("is above data.synthetic.length 256"),
            std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"data.synthetic.curriculum.start_length=257"}).find("is above"), std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"data.synthetic.min_length=8", "data.synthetic.curriculum={}"}).find("keep one"),
            std::string::npos);
  EXPECT_EQ(parse(kSynthetic, {"data.synthetic.lengths=lengths.txt"}).data.synthetic_lengths, "lengths.txt");
  for (const char* other : {"data.synthetic.min_length=8", "data.synthetic.curriculum={start_length: 16}"})
    EXPECT_NE(
        error_of(kSynthetic, {"data.synthetic.lengths=lengths.txt", other}).find("cannot be combined with min_length"),
        std::string::npos)
        << other;
  EXPECT_NE(error_of(kSynthetic, {"data.synthetic.vocab_size=65"}).find("above the model's vocab_size 64"),
            std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"data.synthetic.task=chunk_recal"}).find("chunk_recall, copy"), std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"data.max_sequence_length=255"}).find("is below data.synthetic.length 256"),
            std::string::npos);
}

TEST(RunConfig, WhatExcludesOrNeedsEachOther) {
  const std::vector<std::tuple<std::string, std::vector<std::string>, std::string>> cases{
      {"data: {train: [a]}\n", {}, "run.yaml: no model; set model.path"},
      {"model: {path: a}\n", {}, "run.yaml: no training data; set data.train"},
      {kSynthetic, {"model.path=q"}, "--set: model.path: model.path and model.init are mutually exclusive"},
      {kSynthetic, {"data.train=[a]"}, "--set: data.train: data.train and data.synthetic are mutually exclusive"},
      {kSynthetic, {"data.validation=[a]"}, "--set: data.validation: with data.synthetic"},
      {kSynthetic, {"data.shuffle=false"}, "--set: data.shuffle: has no effect with data.synthetic"},
      {kSynthetic, {"data.overlong=drop"}, "--set: data.overlong: has no effect with data.synthetic"},
      {kFromCheckpoint, {"data.validation=[{path: v, weight: 2}]"}, "remove the weight of 'v'"},
      {kSynthetic, {"train.validation_steps=5", "train.validation_sequences=0"}, "a synthetic task is endless"},
      {kFromCheckpoint, {"train.validation_steps=5"}, "--set: train.validation_steps: there is no validation data"},
      {kFromCheckpoint,
       {"model.rope={factor: 2}"},
       "--set: model.rope.factor: has no effect with type: default; remove it, or choose another type"},
      {kSynthetic, {"batch.micro_batch_sequences=17"}, "is above batch.global_batch_size 16"},
      {kSynthetic, {"batch.micro_batch_tokens=255"}, "is below data.max_sequence_length 256"},
      {kSynthetic, {"optimizer.decay_steps=5"}, "only applies to schedule: warmup_stable_decay"},
      {kSynthetic,
       {"optimizer.schedule=constant", "optimizer.min_learning_rate_ratio=0.1"},
       "has no effect with schedule: constant"},
      {kSynthetic,
       {"balance.compare_steps=5"},
       "balance.compare_steps: there is nothing to compare, because nothing is balanced"},
      {kSynthetic, {"balance.tuning=off"}, "balance.tuning: unknown value 'off'; choose one of none, anchor, optimal"},
      {kSynthetic, {"balance.chunk=100"}, "--set: balance.chunk: 100 is not a multiple of"},
      {kSynthetic, {"balance.chunk=0"}, "--set: balance.chunk:"},
      {kSynthetic,
       {"balance.chunk=some"},
       "--set: balance.chunk: expected auto, none or a number of tokens, found 'some'"},
      {kSynthetic, {"balance.chunk=auto"}, "--set: balance.chunk: needs latency predictions"},
      {kSynthetic, {"balance.chunk=1024", "attention.pattern=vertical_slash"}, "selects with the last queries"},
      {kSynthetic,
       {"balance.chunk=1024", "attention.pattern=topk", "attention.selection=lookahead"},
       "use selection: causal"},
      {kSynthetic,
       {"balance.chunk=1024", "balance.profile=h200-analytic", "attention.pattern=topk", "balance.tuning=anchor"},
       "evens out micro-batches"},
      {kSynthetic, {"train.output_dir=''"}, "--set: train.output_dir: is empty"},
      {kSynthetic, {"train.resume=''"}, "--set: train.resume: is empty"},
      {kFromCheckpoint, {"data.train=[{weight: 2}]"}, "--set: data.train[0]: the path is missing"},
      {kFromCheckpoint, {"data.train=[{path: a, weight: 0}]"}, "--set: data.train[0].weight: must be at least"},
      {kFromCheckpoint, {"data.train=[{path: a, wait: 2}]"}, "unknown key 'wait'; an entry has 'path' and 'weight'"},
      {kFromCheckpoint, {"data.train=a"}, "--set: data.train: expected a list"},
  };
  for (const auto& [yaml, overrides, part] : cases) {
    const std::string message = error_of(yaml, overrides);
    EXPECT_NE(message.find(part), std::string::npos) << "expected: " << part << "\nfound: " << message;
  }
}

TEST(RunConfig, SharedSequencesThatDoNotWorkAreRefused) {
  EXPECT_NE(error_of(kSynthetic, {"parallel.cp=4", "parallel.node_size=3"})
                .find("parallel.node_size: 3 does not divide parallel.cp 4"),
            std::string::npos);
  for (const std::vector<std::string>& pattern :
       std::vector<std::vector<std::string>>{{"attention.pattern=vertical_slash", "attention.selection=lookahead"},
                                             {"attention.pattern=mass", "attention.selection=lookahead"}}) {
    std::vector<std::string> options = {"parallel.cp=2", "parallel.ring_lists=device"};
    options.insert(options.end(), pattern.begin(), pattern.end());
    EXPECT_NE(error_of(kSynthetic, options).find("parallel.ring_lists: device does not support vertical_slash"),
              std::string::npos);
    options[1] = "parallel.ring_lists=auto";
    EXPECT_EQ(error_of(kSynthetic, options), "(no UserError)");
  }
  EXPECT_NE(error_of(kSynthetic, {"parallel.cp=2", "attention.block=64", "attention.query_block=48"})
                .find("does not divide attention.block 64"),
            std::string::npos);
}

TEST(RunConfig, RanksWithNothingToDoAreRefused) {
  EXPECT_NE(error_of(kSynthetic, {"parallel.dp=3", "batch.global_batch_size=2"})
                .find("--set: parallel.dp: 3 ranks for batch.global_batch_size 2"),
            std::string::npos);
  EXPECT_NE(error_of(kSynthetic, {"parallel.pp=1000"}).find("--set: parallel.pp: 1000 stages for"), std::string::npos);
}

TEST(RunConfig, PrintedConfigurationLoadsAgain) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> runs{
      {kSynthetic, {}},
      {kFromCheckpoint, {}},
      {kSynthetic, {"data.synthetic.curriculum={start_length: 16}"}},
      {kSynthetic, {"data.synthetic.min_length=16", "model.init.model_type=llama", "model.init.attention_bias=true"}},
      {kSynthetic, {"model.init.model_type=qwen3", "model.init.head_dim=64", "model.rope={type: linear, factor: 2}"}},
      {kFromCheckpoint, {"data.train=[a, {path: 'b c', weight: 0.3}]", "data.validation=[v]", "train.resume=runs/x"}},
      {kFromCheckpoint, {"model.rope={type: yarn, factor: 4}", "optimizer.schedule=constant"}},
  };
  for (const auto& [yaml, overrides] : runs) {
    const RunConfig config = parse(yaml, overrides);
    const std::string printed = print_run_config(config);
    const RunConfig again = parse(printed);
    EXPECT_EQ(print_run_config(again), printed);
    EXPECT_EQ(again.data.train, config.data.train);
    EXPECT_EQ(again.model.rope, config.model.rope);
    EXPECT_EQ(again.data.synthetic.has_value(), config.data.synthetic.has_value());
    if (config.data.synthetic) {
      EXPECT_EQ(again.data.synthetic->length.min, config.data.synthetic->length.min);
      EXPECT_EQ(again.data.synthetic->curriculum.has_value(), config.data.synthetic->curriculum.has_value());
    }
    if (config.model.init) {
      EXPECT_EQ(again.model.init->qkv_bias, config.model.init->qkv_bias);
    }
  }
}

TEST(RunConfig, LoadsFromAFile) {
  const auto path = std::filesystem::path(testing::TempDir()) / "run_config_test.yaml";
  std::ofstream(path) << kSynthetic << "train: {max_step: 3}\n";
  try {
    load_run_config(path);
    ADD_FAILURE() << "accepted an unknown key";
  } catch (const UserError& error) {
    EXPECT_EQ(error.what(), path.string() + ":3: unknown key 'train.max_step'; did you mean 'train.max_steps'?");
  }
  std::ofstream(path) << kSynthetic << "train: {max_steps: 3}\n";
  EXPECT_EQ(load_run_config(path).train.max_steps, 3);
  EXPECT_EQ(load_run_config(path, {"train.max_steps=4"}).train.max_steps, 4);
  std::filesystem::remove(path);
}

// Before anything is built: the kernels would refuse it in the first step. Needs no GPU.
TEST(RunConfig, HeadsWithoutAKernelAreRefused) {
  const auto refusal = [](const RunConfig& config) -> std::string {
    try {
      run_model_config(config);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const auto with_head_dim = [&](int head_dim, std::vector<std::string> overrides) {
    overrides.push_back(fmt::format("model.init.head_dim={}", head_dim));
    return refusal(parse(kSynthetic, overrides));
  };
  for (const int head_dim : {16, 32, 64, 96, 128}) EXPECT_EQ(with_head_dim(head_dim, {"device=cuda"}), "");
  for (const int head_dim : {8, 48, 80, 112, 192, 256}) {
    EXPECT_EQ(
        with_head_dim(head_dim, {"device=cuda"}),
        fmt::format("model.init: head_dim is {}, and on GPUs attention in bf16 has kernels for 16, 32, 64, 96, 128; "
                    "set train.precision: float32",
                    head_dim));
    EXPECT_EQ(with_head_dim(head_dim, {"device=cuda", "train.precision=float32"}), "");
    EXPECT_EQ(with_head_dim(head_dim, {"device=cpu"}), "");
  }
  const std::vector<std::string> sparse = {"device=cuda", "train.precision=float32", "attention.pattern=topk"};
  EXPECT_NE(with_head_dim(90, sparse).find("multiples of 4; set attention.coverage_rows: 0"), std::string::npos);
  EXPECT_EQ(with_head_dim(90, {sparse[0], sparse[1], sparse[2], "attention.coverage_rows=0"}), "");
  EXPECT_EQ(with_head_dim(90, {sparse[0], sparse[1]}), "");
  // Ranks that share sequences measure where they choose.
  std::vector<std::string> ring = sparse;
  ring.emplace_back("parallel.cp=2");
  EXPECT_NE(with_head_dim(90, ring), "");
  ring.emplace_back("parallel.ring_lists=host");
  EXPECT_EQ(with_head_dim(90, ring), "");

  // A model that is there already.
  const ScratchDirectory scratch;
  write_bytes(scratch / "config.json", R"({"model_type": "llama", "hidden_size": 160, "intermediate_size": 64,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 300,
      "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
      "tie_word_embeddings": true})");
  const std::string path = "model.path=" + scratch.path().string();
  EXPECT_EQ(refusal(parse(kFromCheckpoint, {path, "device=cuda"})),
            (scratch / "config.json").string() +
                ": head_dim is 300, and on GPUs attention has kernels up to 256; set device: cpu");
  EXPECT_EQ(refusal(parse(kFromCheckpoint, {path})), "");
}

// A model of 4096 positions with the given rope override, trained at `length` tokens.
ModelConfig adapted(const std::string& rope, int64_t length, RopeConfig own = {}) {
  ModelConfig model = *parse(kSynthetic).model.init;
  model.max_position_embeddings = 4096;
  model.rope = own;
  model.rope.theta = 1e6;
  std::vector<std::string> overrides{fmt::format("data.max_sequence_length={}", length)};
  if (!rope.empty()) overrides.push_back("model.rope=" + rope);
  adapt_model_config(parse(kFromCheckpoint, overrides), model);
  return model;
}

TEST(RunConfig, RopeOverrideFillsInTheModelsOwnValues) {
  const ModelConfig yarn = adapted("{type: yarn, factor: 4}", 16384);
  EXPECT_EQ(yarn.rope.type, RopeConfig::Type::yarn);
  EXPECT_EQ(yarn.rope.theta, 1e6);
  EXPECT_EQ(yarn.rope.original_max_position_embeddings, 4096);
  EXPECT_EQ(yarn.max_position_embeddings, 16384);
  const ModelConfig explicit_length =
      adapted("{type: yarn, theta: 500, factor: 2, original_max_position_embeddings: 8192}", 4096);
  EXPECT_EQ(explicit_length.rope.theta, 500.0);
  EXPECT_EQ(explicit_length.max_position_embeddings, 16384);
  // Shorter than what it was meant for: the lengths still have the factor's ratio.
  const ModelConfig shorter = adapted("{type: yarn, factor: 2, original_max_position_embeddings: 512}", 1024);
  EXPECT_EQ(shorter.max_position_embeddings, 1024);
  EXPECT_THROW(adapted("{type: yarn, factor: 2, original_max_position_embeddings: 512}", 1025), UserError);
  const ModelConfig linear = adapted("{type: linear, factor: 3}", 4096);
  EXPECT_EQ(linear.rope.original_max_position_embeddings, 0);
  EXPECT_EQ(linear.max_position_embeddings, 12288);
  EXPECT_EQ(adapted("{theta: 1.0e7}", 20000).max_position_embeddings, 20000);
  EXPECT_EQ(adapted("", 4096).max_position_embeddings, 4096);
  // The checkpoint is already scaled: its own scaling says what the original length was.
  RopeConfig scaled;
  scaled.type = RopeConfig::Type::yarn;
  scaled.factor = 4;
  scaled.original_max_position_embeddings = 1024;
  const ModelConfig further = adapted("{type: yarn, factor: 8}", 8192, scaled);
  EXPECT_EQ(further.rope.original_max_position_embeddings, 1024);
  EXPECT_EQ(further.max_position_embeddings, 8192);
}

TEST(RunConfig, AYarnCheckpointReachesAsFarAsItsFactorSays) {
  // As model cards tell to write it: the scaling put in, max_position_embeddings (4096) left alone.
  RopeConfig yarn;
  yarn.type = RopeConfig::Type::yarn;
  yarn.factor = 4;
  yarn.original_max_position_embeddings = 4096;
  const ModelConfig model = adapted("", 10000, yarn);
  EXPECT_EQ(model.rope.factor, 4);
  EXPECT_EQ(model.max_position_embeddings, 16384) << "so that the ratio of the lengths is the factor, too";
  EXPECT_THROW(adapted("", 16385, yarn), UserError);
  // Llama-3.2's factor times its original length is twice what it is meant for.
  RopeConfig llama3 = yarn;
  llama3.type = RopeConfig::Type::llama3;
  EXPECT_THROW(adapted("", 10000, llama3), UserError);
}

TEST(RunConfig, SequencesBeyondTheModelAreRefused) {
  try {
    adapted("", 10000);
    ADD_FAILURE() << "accepted sequences longer than the model";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("the model supports 4096"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("factor: 3"), std::string::npos) << error.what();
  }
  EXPECT_THROW(adapted("{type: yarn, factor: 2}", 10000), UserError);
  EXPECT_NO_THROW(adapted("{type: yarn, factor: 3}", 10000));
  // A scaled model has an original length, which is what a factor multiplies.
  RopeConfig scaled;
  scaled.type = RopeConfig::Type::llama3;
  scaled.original_max_position_embeddings = 1024;
  try {
    adapted("", 10000, scaled);
    ADD_FAILURE() << "accepted sequences longer than the model";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("factor: 10)"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(adapted("{type: yarn, factor: 10}", 10000, scaled));
  // The factor of another override would take the place of one that is too small: 4 times 4096, not twice 8192.
  try {
    adapted("{type: linear, factor: 2}", 16384);
    ADD_FAILURE() << "accepted sequences longer than the model";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("the model supports 8192"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("factor: 4)"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(adapted("{type: yarn, factor: 4}", 16384));
}

TEST(RunConfig, ScoresByPlanes) {
  const SelectionConfig defaults = parse(kSynthetic, {"attention.pattern=topk"}).attention.selection;
  EXPECT_EQ(defaults.score, BlockScore::planes);
  EXPECT_EQ(defaults.score_channels, 32);
  const auto refused = [](const std::vector<std::string>& overrides, const std::string& part) {
    std::string message;
    try {
      parse(kSynthetic, overrides);
    } catch (const UserError& error) {
      message = error.what();
    }
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  for (const char* channels : {"0", "-2", "7", "2048"})
    refused({"attention.pattern=mass", fmt::format("attention.score_channels={}", channels)},
            "attention.score_channels");
  refused({"attention.pattern=topk", "attention.score_tokens=1"},
          "attention.score_tokens: 1 has no effect with attention.score: planes");
  refused({"attention.score=largest"}, "attention.score");
  EXPECT_NO_THROW(parse(kSynthetic, {"attention.pattern=topk", "attention.score=moments", "attention.score_tokens=1"}));

  // Heads that are narrower than the default take all of their channels; another number has to fit.
  SelectionConfig narrow = defaults;
  settle_score_channels(narrow, 16);
  EXPECT_EQ(narrow.score_channels, 16);
  narrow.score_channels = 18;
  EXPECT_THROW(settle_score_channels(narrow, 16), UserError);
  SelectionConfig wide = defaults;
  settle_score_channels(wide, 128);
  EXPECT_EQ(wide.score_channels, 32);
}

TEST(RunConfig, DocumentationIsThatOfTheTable) {
  std::ifstream file(std::string(SB_SOURCE_DIR) + "/docs/configuration.md");
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), run_config_markdown())
      << "write it again: build/cpu/src/cli/sparsebalance config --markdown > docs/configuration.md";
}

TEST(RunConfig, ExamplesLoad) {
  int examples = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(SB_SOURCE_DIR) + "/examples")) {
    if (entry.path().extension() != ".yaml") continue;
    EXPECT_NO_THROW(load_run_config(entry.path())) << entry.path();
    ++examples;
  }
  EXPECT_GE(examples, 1);
}

}  // namespace
}  // namespace sb
