#include "run/config/run_config_lora.h"

#include <fmt/format.h>

#include "core/errors.h"
#include "model/adapter/peft_config.h"

namespace sb {
namespace {

void add_targets(OptionTable& table, LoraConfig& lora) {
  table.add(
      "lora.targets", "all-linear or a list", "",
      fmt::format("linear layers that get an adapter: all seven, or a list of some of {}",
                  fmt::join(LoraConfig().target_names(), ", ")),
      [&lora](const ConfigValue& given, const std::string& label) {
        LoraConfig read;
        if (given.kind == ConfigValue::Kind::scalar && given.text == "all-linear") {
          lora.targets = read.targets;
          return;
        }
        SB_USER_CHECK(given.kind == ConfigValue::Kind::list && !given.items.empty(),
                      "{}: {}: expected all-linear or a list of names, found {}", given.where, label, given.describe());
        read.targets = {};
        for (const ConfigValue& item : given.items) {
          const std::string name = config_text(item, label);
          const int module = find_lora_module(name);
          SB_USER_CHECK(module < kLoraModules, "{}: {}: '{}' is not a linear layer of these models; choose from {}",
                        item.where, label, name, fmt::join(LoraConfig().target_names(), ", "));
          read.targets[static_cast<size_t>(module)] = true;
        }
        lora.targets = read.targets;
      },
      [&lora] {
        return lora.targets == LoraConfig().targets ? std::string("all-linear")
                                                    : fmt::format("[{}]", fmt::join(lora.target_names(), ", "));
      });
}

void add_train(OptionTable& table, LoraConfig& lora) {
  table.add(
      "lora.train", "list of norms, embedding, head", "",
      "parts of the base model that are fully trained along with the adapters; norms and embedding help when extending "
      "the context",
      [&lora](const ConfigValue& given, const std::string& label) {
        LoraConfig read = lora;
        read.norms = read.embedding = read.head = false;
        for (const ConfigValue& item : config_list(given, label)) {
          const std::string name = config_text(item, label);
          bool* part = name == "norms"       ? &read.norms
                       : name == "embedding" ? &read.embedding
                       : name == "head"      ? &read.head
                                             : nullptr;
          SB_USER_CHECK(part, "{}: {}: '{}' is not known; choose from norms, embedding, head", item.where, label, name);
          *part = true;
        }
        lora = read;
      },
      [&lora] {
        std::vector<std::string> parts;
        if (lora.norms) parts.emplace_back("norms");
        if (lora.embedding) parts.emplace_back("embedding");
        if (lora.head) parts.emplace_back("head");
        return fmt::format("[{}]", fmt::join(parts, ", "));
      });
}

}  // namespace

void add_lora_options(OptionTable& table, LoraOptions& lora, bool* present) {
  table.section("lora",
                "Trains low-rank adapters instead of the whole model (docs/lora.md). The model's own weights are "
                "frozen and kept in the dtype of the activations, without gradients and moments.",
                present);
  table.integer("lora.rank", &lora.config.rank, 1, 1 << 12, "rank of every adapter");
  table.number("lora.alpha", &lora.config.alpha, 1e-6, 1e6, "adapters are scaled by alpha / rank");
  table.number("lora.dropout", &lora.config.dropout, 0.0, 0.9, "dropout on the adapters' input during training");
  add_targets(table, lora.config);
  table.flag("lora.rslora", &lora.config.rslora, "scale adapters by alpha / sqrt(rank) instead");
  add_train(table, lora.config);
  table.path("lora.adapter", &lora.adapter,
             "PEFT directory of an adapter to continue from, with the same rank, alpha, targets and trained parts; "
             "empty: start a new one");
  table.flag("lora.merged", &lora.merged,
             "also write merged/, the model with the adapter merged into its weights; always written if `train` names "
             "a part or model.rope is set");
}

void check_lora(const RunConfig& config, const OptionTable& table) {
  if (!config.lora) return;
  SB_USER_CHECK(!config.lora->merged || !config.model.path.empty(),
                "{}: there is no checkpoint to merge the adapter into; set model.path, or remove it",
                table.label("lora.merged"));
  SB_USER_CHECK(!config.writes_merged() || !config.model.path.empty(),
                "{}: changes more than an adapter can hold, so the merged model has to be written as well, for which "
                "model.init is not enough; set model.path instead",
                table.label(config.model.rope ? "model.rope" : "lora.train"));
}

void check_lora_fits(const RunConfig& config, const ModelConfig& model) {
  if (!config.lora) return;
  SB_USER_CHECK(!config.lora->config.head || !model.tie_word_embeddings,
                "lora.train: head: this model shares its LM head with the embedding (tie_word_embeddings); name "
                "embedding instead");
}

}  // namespace sb
