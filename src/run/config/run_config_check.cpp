#include "run/config/run_config_check.h"

#include "core/errors.h"
#include "run/config/run_config_balance.h"
#include "run/config/run_config_lora.h"
#include "run/config/run_config_parallel.h"
#include "run/config/run_config_precision.h"

namespace sb {
namespace {

void check_model(const RunConfig& config, const OptionTable& table, const std::string& file) {
  const ModelOptions& model = config.model;
  SB_USER_CHECK(!model.path.empty() || model.init,
                "{}: no model; set model.path to a Hugging Face checkpoint, or model.init to train one from scratch",
                file);
  SB_USER_CHECK(model.path.empty() || !model.init,
                "{}: model.path and model.init are mutually exclusive; keep one, or add --set model.init=null",
                table.label("model.path"));
  if (model.init) {
    const ModelConfig& init = *model.init;
    SB_USER_CHECK(init.heads % init.kv_heads == 0,
                  "{}: {} key/value heads do not divide {} query heads; change one of the two",
                  table.label("model.init.num_key_value_heads"), init.kv_heads, init.heads);
    SB_USER_CHECK(init.head_dim > 0 && init.head_dim % 2 == 0, "{}: must be even, found {}",
                  table.label("model.init.head_dim"), init.head_dim);
  }
  if (model.rope) {
    SB_USER_CHECK(model.rope->type != RopeConfig::Type::standard || model.rope->factor == 1.0,
                  "{}: has no effect with type: default; remove it, or choose another type",
                  table.label("model.rope.factor"));
  }
}

void check_data(const RunConfig& config, const OptionTable& table, const std::string& file) {
  const DataOptions& data = config.data;
  SB_USER_CHECK(!data.train.empty() || data.synthetic,
                "{}: no training data; set data.train to token files, or data.synthetic to a built-in task", file);
  SB_USER_CHECK(data.train.empty() || !data.synthetic,
                "{}: data.train and data.synthetic are mutually exclusive; keep one, or add --set data.synthetic=null",
                table.label("data.train"));
  SB_USER_CHECK(!data.synthetic || data.validation.empty(),
                "{}: with data.synthetic, validation draws from the task itself; remove it",
                table.label("data.validation"));
  SB_USER_CHECK(config.train.validation_steps == 0 || data.synthetic || !data.validation.empty(),
                "{}: there is no validation data; set data.validation", table.label("train.validation_steps"));
  for (const WeightedPath& path : data.validation)
    SB_USER_CHECK(path.weight == 1.0, "{}: validation files are read as they are; remove the weight of '{}'",
                  table.label("data.validation"), path.path.string());
  SB_USER_CHECK(!data.synthetic || config.train.validation_steps == 0 || config.train.validation_sequences > 0,
                "{}: a synthetic task is endless; set the number of sequences to validate on",
                table.label("train.validation_sequences"));
  SB_USER_CHECK(!data.synthetic || data.shuffle, "{}: has no effect with data.synthetic; remove it",
                table.label("data.shuffle"));
  SB_USER_CHECK(!data.synthetic || data.overlong == Overlong::split, "{}: has no effect with data.synthetic; remove it",
                table.label("data.overlong"));
  const bool by_tokens = data.mixture == DataOptions::Mixture::tokens;
  SB_USER_CHECK(!by_tokens || (data.train.size() > 1 && data.shuffle),
                "{}: tokens needs several entries in data.train, and data.shuffle: true", table.label("data.mixture"));
  if (config.train.num_train_epochs > 0) {
    SB_USER_CHECK(
        !by_tokens,
        "{}: with data.mixture: tokens there is no such thing as one pass over the data; set train.max_steps instead",
        table.label("train.num_train_epochs"));
    SB_USER_CHECK(!data.synthetic, "{}: a synthetic task is endless; set train.max_steps instead",
                  table.label("train.num_train_epochs"));
    for (const WeightedPath& path : data.train)
      SB_USER_CHECK(path.weight == 1.0,
                    "{}: with weights ('{}' has one) there is no such thing as one pass over the data; set "
                    "train.max_steps instead",
                    table.label("train.num_train_epochs"), path.path.string());
  }
  if (data.synthetic) {
    const SyntheticOptions& task = *data.synthetic;
    const int64_t longest = task.curriculum ? task.curriculum->end : task.length.max;
    SB_USER_CHECK(longest <= data.max_sequence_length, "{}: {} is below data.synthetic.length {}",
                  table.label("data.max_sequence_length"), data.max_sequence_length, longest);
    SB_USER_CHECK(task.length.min <= task.length.max, "{}: {} is above data.synthetic.length {}",
                  table.label("data.synthetic.min_length"), task.length.min, task.length.max);
    SB_USER_CHECK(
        data.synthetic_lengths.empty() || (task.length.kind == LengthDistribution::Kind::fixed && !task.curriculum),
        "{}: cannot be combined with min_length or curriculum; keep one", table.label("data.synthetic.lengths"));
    if (task.curriculum) {
      SB_USER_CHECK(task.length.kind == LengthDistribution::Kind::fixed,
                    "{}: cannot be combined with data.synthetic.curriculum; keep one",
                    table.label("data.synthetic.min_length"));
      SB_USER_CHECK(task.curriculum->start <= task.curriculum->end, "{}: {} is above data.synthetic.length {}",
                    table.label("data.synthetic.curriculum.start_length"), task.curriculum->start,
                    task.curriculum->end);
    }
    SB_USER_CHECK(!config.model.init || task.vocab_size <= config.model.init->vocab_size,
                  "{}: {} is above the model's vocab_size {}", table.label("data.synthetic.vocab_size"),
                  task.vocab_size, config.model.init->vocab_size);
  }
}

void check_batch(const RunConfig& config, const OptionTable& table) {
  const BatchOptions& batch = config.batch;
  SB_USER_CHECK(batch.micro_batch_sequences <= batch.global_batch_size, "{}: {} is above batch.global_batch_size {}",
                table.label("batch.micro_batch_sequences"), batch.micro_batch_sequences, batch.global_batch_size);
  SB_USER_CHECK(batch.micro_batch_tokens == 0 || batch.micro_batch_tokens >= config.data.max_sequence_length,
                "{}: {} is below data.max_sequence_length {}: the longest sequence would not fit in any micro-batch; "
                "raise it, or set 0",
                table.label("batch.micro_batch_tokens"), batch.micro_batch_tokens, config.data.max_sequence_length);
}

// What does not go together is named by its key there; where that stands is known here.
void check_selection(const SelectionConfig& selection, const OptionTable& table) {
  if (selection.pattern == SelectionPattern::dense) return;
  try {
    check_selection_config(selection);
  } catch (const UserError& error) {
    const std::string message = error.what();
    const size_t key = message.find(':');
    throw UserError("{}{}", table.label(message.substr(0, key)), message.substr(key));
  }
}

void check_attention(const RunConfig& config, const OptionTable& table) {
  check_selection(config.attention.selection, table);
  const bool dumps = !config.attention.dump_index.empty();
  SB_USER_CHECK(!dumps || config.attention.selection.pattern != SelectionPattern::dense,
                "{}: pattern: dense makes no block lists that could be saved; remove it, or choose another pattern",
                table.label("attention.dump_index"));
  SB_USER_CHECK(!dumps || config.parallel.cp == 1,
                "{}: with parallel.cp {} each rank holds only part of the lists; set parallel.cp: 1",
                table.label("attention.dump_index"), config.parallel.cp);
  SB_USER_CHECK(!dumps || config.parallel.tp == 1,
                "{}: with parallel.tp {} each rank holds only part of the lists; set parallel.tp: 1",
                table.label("attention.dump_index"), config.parallel.tp);
}

void check_optimizer(const RunConfig& config, const OptionTable& table) {
  const OptimizerOptions& optimizer = config.optimizer;
  using Schedule = OptimizerOptions::Schedule;
  const bool stable = optimizer.schedule == Schedule::warmup_stable_decay;
  SB_USER_CHECK(stable || optimizer.decay_steps == 0, "{}: only applies to schedule: warmup_stable_decay; remove it",
                table.label("optimizer.decay_steps"));
  SB_USER_CHECK(optimizer.schedule != Schedule::constant || optimizer.min_learning_rate_ratio == 0.0,
                "{}: has no effect with schedule: constant; remove it",
                table.label("optimizer.min_learning_rate_ratio"));
}

void check_train(const RunConfig& config, const OptionTable& table) {
  // A file may have both, as those that are printed do. Whoever overrides one wants it to count.
  SB_USER_CHECK(config.train.num_train_epochs == 0 || !table.overridden("train.max_steps"),
                "{}: has no effect, since {} is {}; add --set train.num_train_epochs=0", table.label("train.max_steps"),
                table.label("train.num_train_epochs"), config.train.num_train_epochs);
  SB_USER_CHECK(!config.train.output_dir.empty(), "{}: is empty; name the directory for the run's files",
                table.label("train.output_dir"));
  SB_USER_CHECK(!config.train.resume.empty(), "{}: is empty; set auto, never or the path of a checkpoint",
                table.label("train.resume"));
}

}  // namespace

void check_run_config(const RunConfig& config, const OptionTable& table, const std::string& file) {
  check_model(config, table, file);
  check_data(config, table, file);
  check_batch(config, table);
  check_balance(config, table);
  check_parallel(config, table);
  check_attention(config, table);
  check_optimizer(config, table);
  check_lora(config, table);
  check_precision(config, table);
  check_train(config, table);
}

}  // namespace sb
