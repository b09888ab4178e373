#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "cli/data/data_commands.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/thread_pool.h"
#include "data/files/token_check.h"
#include "data/text/token_origin.h"
#include "model/model_config.h"

namespace sb {
namespace {

struct CheckArguments {
  std::vector<std::string> paths;
  std::string model;
  int64_t vocab_size = 0;
  int threads = 0;
};

std::string describe(const TokenFile& file, const TokenCheck& check, int64_t vocab_size) {
  std::string text =
      fmt::format("{}: {} documents, {} tokens, {} targets", file.name(), check.documents, check.tokens, check.targets);
  if (check.tokens > 0) text += fmt::format(", ids {} to {}", check.smallest, check.largest);
  if (check.short_documents > 0)
    text += fmt::format("; {} documents have fewer than two tokens and are skipped in training", check.short_documents);
  if (check.sound()) return text + ": ok\n";
  text += '\n';
  if (check.outside) {
    text += fmt::format("  {} tokens in {} documents are outside {}, first token {} of document {}: {}\n",
                        check.outside_tokens, check.outside_documents,
                        vocab_size > 0 ? fmt::format("the vocabulary of {}", vocab_size) : "every vocabulary",
                        check.outside->token, check.outside->document, check.outside->id);
  }
  if (check.wrong_mask)
    text +=
        fmt::format("  {}.mask does not have the number of targets it declares in {} documents, first in document {}\n",
                    file.name(), check.wrong_masks, *check.wrong_mask);
  return text;
}

void check(CheckArguments arguments) {
  if (!arguments.model.empty()) {
    std::filesystem::path config = arguments.model;
    if (std::filesystem::is_directory(config)) config /= "config.json";
    arguments.vocab_size = read_model_config(config).vocab_size;
    warn_of_other_tokenizer(arguments.paths, config.parent_path());
  }
  std::vector<std::unique_ptr<TokenFile>> files;
  int64_t total = 0, done = 0, bad = 0;
  for (const std::string& path : expand_token_paths(arguments.paths)) {
    try {
      files.push_back(open_token_file(path));
      total += files.back()->total_tokens();
    } catch (const UserError& damage) {
      fmt::print("{}\n", damage.what());
      ++bad;
    }
  }
  const int64_t all_files = std::ssize(files) + bad;
  ThreadPool threads(arguments.threads > 0 ? arguments.threads : available_cores());
  Progress progress;
  for (const auto& file : files) {
    const TokenCheck found = check_token_file(*file, arguments.vocab_size, threads, [&](int64_t tokens) {
      const auto all = static_cast<double>(done + tokens);
      progress.show(all / static_cast<double>(total),
                    fmt::format("{:.1f} M tokens  {:.1f} M/s", all / 1e6, all / 1e6 / progress.seconds()));
    });
    done += found.tokens;
    progress.clear();
    fmt::print("{}", describe(*file, found, arguments.vocab_size));
    std::fflush(stdout);
    bad += !found.sound();
  }
  SB_USER_CHECK(bad == 0,
                "data check: {} of {} token files cannot be used for training; tokenize them again with the model's "
                "own tokenizer",
                bad, all_files);
}

}  // namespace

void add_data_check(CLI::App& data) {
  CLI::App* command =
      data.add_subcommand("check", "read token files from start to end and check them against the model's vocabulary");
  auto arguments = std::make_shared<CheckArguments>();
  command
      ->add_option("paths", arguments->paths,
                   "token files: prefixes of .bin and .idx, llm.c .bin files, or directories of MDS shards")
      ->required();
  CLI::Option* model = command->add_option("--model", arguments->model,
                                           "model (directory or config.json) whose vocabulary to check against");
  command
      ->add_option("--vocab-size", arguments->vocab_size,
                   "token ids must be below this; without it and without --model any id is valid")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->excludes(model);
  command->add_option("--threads", arguments->threads, "worker threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([arguments] { check(*arguments); });
}

}  // namespace sb
