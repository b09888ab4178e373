#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/data/data_commands.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/log.h"
#include "core/thread_pool.h"
#include "data/text/tokenize_job.h"

namespace sb {
namespace {

double share_of(int64_t bytes, const TokenizeProgress& progress) {
  return static_cast<double>(bytes) / static_cast<double>(progress.total_bytes);
}

void tokenize(const TokenizeOptions& options) {
  Progress bar;
  bool announced = false;
  const TokenizeProgress done = tokenize_files(options, [&](const TokenizeProgress& progress) {
    if (!announced && progress.resumed_bytes > 0) {
      bar.begin_at(share_of(progress.resumed_bytes, progress));
      log::info("continuing after {:.1f} MB of {:.1f} MB", static_cast<double>(progress.resumed_bytes) / 1e6,
                static_cast<double>(progress.total_bytes) / 1e6);
    }
    announced = true;
    bar.show(share_of(progress.bytes, progress),
             fmt::format("{} documents  {:.1f} M tokens  {:.1f} MB/s", progress.documents,
                         static_cast<double>(progress.tokens) / 1e6,
                         static_cast<double>(progress.bytes - progress.resumed_bytes) / bar.seconds() / 1e6));
  });
  bar.clear();
  const double seconds = bar.seconds();
  const double share = share_of(done.bytes - done.resumed_bytes, done);
  std::printf(
      "%s: %lld documents, %lld tokens, %lld bad lines skipped; %.1f s, %.2f M tokens/s, %.1f MB/s, %d workers\n",
      options.output.c_str(), static_cast<long long>(done.documents), static_cast<long long>(done.tokens),
      static_cast<long long>(done.bad_lines), seconds, share * static_cast<double>(done.tokens) / seconds / 1e6,
      static_cast<double>(done.bytes - done.resumed_bytes) / seconds / 1e6, options.workers);
}

}  // namespace

void add_data_tokenize(CLI::App& data) {
  CLI::App* command = data.add_subcommand("tokenize", "tokenize JSONL text into token files, one sequence per line");
  auto options = std::make_shared<TokenizeOptions>();
  options->workers = available_cores();
  command
      ->add_option("--tokenizer", options->tokenizer, "Hugging Face tokenizer.json (byte-level BPE), or its directory")
      ->required();
  command
      ->add_option("--input", options->inputs,
                   "JSONL files with plain text, chats (messages, or ShareGPT's conversations), prompt and completion, "
                   "or Alpaca's instruction and output; .gz and .zst are decompressed")
      ->required();
  command->add_option("--output", options->output, "prefix of the .bin, .idx and .mask files to write")
      ->required()
      ->check(names_files, "PREFIX");
  command->add_flag("--append-eod", options->documents.append_eod,
                    "append the end-of-document token to every document");
  command
      ->add_flag("--no-end-token{false}", options->documents.end_completions,
                 "leave completions without the end-of-document token, which is appended otherwise")
      ->excludes("--append-eod");
  command->add_option(
      "--eod-token", options->documents.eod_token,
      "the end-of-document token (default: <|endoftext|>, <|end_of_text|> or </s>, whichever the tokenizer has)");
  command->add_flag(
      "--add-special-tokens", options->documents.add_special_tokens,
      "add the special tokens of the tokenizer's post-processor to texts and prompts (Llama-3: <|begin_of_text|>)");
  command->add_option("--text-key", options->text_key, "JSON key of the plain text")->capture_default_str();
  command->add_flag("--skip-bad-lines", options->skip_bad_lines, "skip lines that cannot be used, and count them");
  command->add_option("--workers", options->workers, "worker threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_flag("--restart", options->restart, "start over instead of resuming an interrupted run of this output");
  command->add_flag("--overwrite", options->overwrite, "replace a finished output");
  command->callback([options] {
    SB_USER_CHECK(!options->output.empty(), "--output: is empty; name the prefix of the files to write");
    if (const std::filesystem::path folder = options->tokenizer; std::filesystem::is_directory(folder))
      options->tokenizer = (folder / "tokenizer.json").string();
    tokenize(*options);
  });
}

}  // namespace sb
