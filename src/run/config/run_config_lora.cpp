#include "run/config/run_config_lora.h"

#include "core/errors.h"
#include "model/adapter/peft_config.h"

namespace sb {
namespace {

void add_targets(OptionTable& table, LoraConfig& lora) {
  table.add(
      "lora.targets", "all-linear or a list", "",
      fmt::format("products that get an adapter: all seven, or some of {}",
                  fmt::join(LoraConfig().target_names(), ", ")),
      [&lora](const ConfigValue& given, const std::string& label) {
        LoraConfig read;
        if (given.kind == ConfigValue::Kind::scalar && given.text == "all-linear") {
          lora.targets = read.targets;
          return;
        }
        SB_USER_CHECK(given.kind == ConfigValue::Kind::list && !given.items.empty(),
                      "{}: {}: all-linear or a list of names is expected", given.where, label);
        read.targets = {};
        for (const ConfigValue& item : given.items) {
          const std::string name = config_text(item, label);
          const int module = find_lora_module(name);
          SB_USER_CHECK(module < kLoraModules, "{}: {}: '{}' matches nothing in these models; choose from {}",
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
      "parts of the model itself that are trained along with the adapters, whole; for longer contexts norms and "
      "embedding help",
      [&lora](const ConfigValue& given, const std::string& label) {
        LoraConfig read = lora;
        read.norms = read.embedding = read.head = false;
        for (const ConfigValue& item : config_list(given, label)) {
          const std::string name = config_text(item, label);
          bool* part = name == "norms"       ? &read.norms
                       : name == "embedding" ? &read.embedding
                       : name == "head"      ? &read.head
                                             : nullptr;
          SB_USER_CHECK(part, "{}: {}: '{}' is none of norms, embedding, head", item.where, label, name);
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
                "Low-rank adapters instead of the whole model, docs/lora.md. The model's own weights stay as they are, "
                "in the type of the activations, without gradients and moments.",
                present);
  table.integer("lora.rank", &lora.config.rank, 1, 1 << 12, "rank of every adapter");
  table.number("lora.alpha", &lora.config.alpha, 1e-6, 1e6, "an adapter counts alpha / rank times");
  table.number("lora.dropout", &lora.config.dropout, 0.0, 0.9,
               "share of an adapter's input that is dropped in training");
  add_targets(table, lora.config);
  table.flag("lora.rslora", &lora.config.rslora, "an adapter counts alpha / sqrt(rank) times");
  add_train(table, lora.config);
  table.path(
      "lora.adapter", &lora.adapter,
      "PEFT directory of an adapter to continue from, with the same rank, alpha, targets and parts; empty: a new one");
  table.flag("lora.merged", &lora.merged,
             "also write merged/, the model with the adapter in its weights; always written where `train` names a part "
             "or model.rope is given");
}

void check_lora(const RunConfig& config, const OptionTable& table) {
  if (!config.lora) return;
  SB_USER_CHECK(!config.lora->merged || !config.model.path.empty(),
                "{}: there is no model to merge with; set model.path, or take it out", table.label("lora.merged"));
  SB_USER_CHECK(!config.writes_merged() || !config.model.path.empty(),
                "{}: the model has to be written whole, since the adapter alone would not give it; set model.path in "
                "place of model.init",
                table.label(config.model.rope ? "model.rope" : "lora.train"));
}

void check_lora_fits(const RunConfig& config, const ModelConfig& model) {
  if (!config.lora) return;
  SB_USER_CHECK(!config.lora->config.head || !model.tie_word_embeddings,
                "lora.train: head: this model's head is its embedding (tie_word_embeddings); name embedding instead");
}

}  // namespace sb
