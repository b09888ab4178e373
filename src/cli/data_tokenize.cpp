#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/data_commands.h"
#include "core/errors.h"
#include "core/log.h"
#include "core/thread_pool.h"
#include "data/tokenize_job.h"

namespace sb {
namespace {

using Clock = std::chrono::steady_clock;

// A bar that is redrawn on a terminal, a line every ten seconds elsewhere.
class ProgressBar {
 public:
  ProgressBar() : terminal_(::isatty(STDERR_FILENO) != 0) {}

  void show(const TokenizeProgress& progress) {
    const auto now = Clock::now();
    const double pause = std::chrono::duration<double>(now - shown_).count();
    if (pause < (terminal_ ? 0.2 : 10.0)) return;
    shown_ = now;
    const double share = static_cast<double>(progress.bytes) / static_cast<double>(progress.total_bytes);
    const double seconds = elapsed();
    const double rate = static_cast<double>(progress.bytes - progress.resumed_bytes) / seconds;
    const double left = rate > 0.0 ? static_cast<double>(progress.total_bytes - progress.bytes) / rate : 0.0;
    const std::string line =
        fmt::format("{:5.1f} %  {} documents  {:.1f} M tokens  {:.1f} MB/s  {:.0f} s left", 100.0 * share,
                    progress.documents, static_cast<double>(progress.tokens) / 1e6, rate / 1e6, left);
    if (terminal_) {
      const auto filled = static_cast<size_t>(30.0 * share);
      std::fprintf(stderr, "\r[%s%s] %s\033[K", std::string(filled, '#').c_str(), std::string(30 - filled, ' ').c_str(),
                   line.c_str());
      drawn_ = true;
    } else {
      log::info("{}", line);
    }
  }
  // Leaves the terminal's line free again.
  void clear() {
    if (drawn_) std::fprintf(stderr, "\r\033[K");
    drawn_ = false;
  }
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  bool terminal_, drawn_ = false;
  Clock::time_point start_ = Clock::now(), shown_ = Clock::now();
};

void tokenize(const TokenizeOptions& options) {
  ProgressBar bar;
  TokenizeProgress done;
  bool announced = false;
  try {
    done = tokenize_files(options, [&](const TokenizeProgress& progress) {
      if (!announced && progress.resumed_bytes > 0)
        log::info("going on after {:.1f} MB of {:.1f} MB", static_cast<double>(progress.resumed_bytes) / 1e6,
                  static_cast<double>(progress.total_bytes) / 1e6);
      announced = true;
      bar.show(progress);
    });
  } catch (...) {
    bar.clear();
    throw;
  }
  bar.clear();
  const double seconds = bar.elapsed();
  const double share = static_cast<double>(done.bytes - done.resumed_bytes) / static_cast<double>(done.total_bytes);
  std::printf(
      "%s: %lld documents, %lld tokens, %lld bad lines skipped; %.1f s, %.2f M tokens/s, %.1f MB/s, %d workers\n",
      options.output.c_str(), static_cast<long long>(done.documents), static_cast<long long>(done.tokens),
      static_cast<long long>(done.bad_lines), seconds, share * static_cast<double>(done.tokens) / seconds / 1e6,
      static_cast<double>(done.bytes - done.resumed_bytes) / seconds / 1e6, options.workers);
}

}  // namespace

void add_data_tokenize(CLI::App& data) {
  CLI::App* command = data.add_subcommand("tokenize", "turn JSONL text into token files, one sequence a line");
  auto options = std::make_shared<TokenizeOptions>();
  options->workers = available_cores();
  command
      ->add_option("--tokenizer", options->tokenizer, "a Hugging Face tokenizer.json (byte-level BPE), or its folder")
      ->required();
  command->add_option("--input", options->inputs, "JSONL files with text, messages, or prompt and completion")
      ->required();
  command->add_option("--output", options->output, "prefix of the .bin, .idx and .mask files written")->required();
  command->add_flag("--append-eod", options->documents.append_eod, "end every document with the end-of-document token");
  command->add_option("--eod-token", options->documents.eod_token,
                      "that token; otherwise <|endoftext|>, <|end_of_text|> or </s>, whichever there is");
  command->add_flag("--add-special-tokens", options->documents.add_special_tokens,
                    "add what the tokenizer's post-processor adds to text (Llama-3: <|begin_of_text|>)");
  command->add_option("--text-key", options->text_key, "key of plain text")->capture_default_str();
  command->add_flag("--skip-bad-lines", options->skip_bad_lines, "leave lines that cannot be used out, and count them");
  command->add_option("--workers", options->workers, "threads")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_flag("--restart", options->restart, "forget an interrupted run of this output instead of going on");
  command->add_flag("--overwrite", options->overwrite, "replace a finished output");
  command->callback([options] {
    if (const std::filesystem::path folder = options->tokenizer; std::filesystem::is_directory(folder))
      options->tokenizer = (folder / "tokenizer.json").string();
    tokenize(*options);
  });
}

}  // namespace sb
