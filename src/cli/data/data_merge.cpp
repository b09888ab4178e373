#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/data/data_commands.h"
#include "data/files/token_file.h"
#include "data/text/token_copy.h"

namespace sb {
namespace {

void print_copied(const std::string& prefix, const CopiedDocuments& copied) {
  fmt::print("{}: {} documents, {} tokens{}\n", prefix, copied.documents, copied.tokens,
             copied.left_out > 0 ? fmt::format("; {} without a target were skipped", copied.left_out) : "");
}

}  // namespace

void add_data_merge(CLI::App& data) {
  struct Arguments {
    std::vector<std::string> paths;
    std::string output;
    bool overwrite = false;
  };
  CLI::App* command = data.add_subcommand("merge", "merge token files into one");
  auto a = std::make_shared<Arguments>();
  command
      ->add_option("paths,--input", a->paths,
                   "token files: prefixes of .bin and .idx, llm.c .bin files, or directories of MDS shards; wildcards "
                   "are expanded")
      ->required();
  command->add_option("--output", a->output, "prefix of the files to write")->required();
  command->add_flag("--overwrite", a->overwrite, "replace an existing output");
  command->callback(
      [a] { print_copied(a->output, merge_token_files(expand_token_paths(a->paths), a->output, a->overwrite)); });
}

void add_data_split(CLI::App& data) {
  struct Arguments {
    std::string path, output;
    double validation = 0.01;
    uint64_t seed = 1;
    bool overwrite = false;
  };
  CLI::App* command = data.add_subcommand("split", "split a token file into one for training and one for validation");
  auto a = std::make_shared<Arguments>();
  command
      ->add_option("path,--input", a->path,
                   "token file: prefix of .bin and .idx, an llm.c .bin file, or a directory of MDS shards")
      ->required();
  command->add_option("--output", a->output, "prefix; writes OUTPUT-train and OUTPUT-validation")->required();
  command->add_option("--validation", a->validation, "fraction of the documents to set aside for validation")
      ->capture_default_str();
  command->add_option("--seed", a->seed, "random seed of the draw")->capture_default_str();
  command->add_flag("--overwrite", a->overwrite, "replace existing outputs");
  command->callback([a] {
    const std::string train = a->output + "-train", validation = a->output + "-validation";
    const SplitDocuments split = split_token_file(a->path, train, validation, a->validation, a->seed, a->overwrite);
    print_copied(train, split.train);
    print_copied(validation, split.validation);
  });
}

}  // namespace sb
