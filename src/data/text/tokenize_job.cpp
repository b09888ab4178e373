#include "data/text/tokenize_job.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "core/files/mapped_file.h"
#include "core/log.h"
#include "core/thread_pool.h"
#include "core/utf8.h"
#include "data/files/token_writer.h"
#include "data/text/text_stream.h"
#include "data/text/token_origin.h"

namespace sb {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

// Input handed to the workers at once: enough lines to keep them busy, little enough to hold in memory.
constexpr size_t kBatchBytes = size_t{4} << 20;
constexpr int64_t kShownBadLines = 5;
constexpr int64_t kMostText = int64_t{1} << 62;  // bytes of a file, unpacked

struct Line {
  std::string_view text;
  int64_t number = 0;
  EncodedDocument document;
  std::string error;  // empty when the line is fine
};

// What data sets often come as. Without this every line of it would be said to be no JSON.
void refuse_other_formats(const std::string& path, std::string_view text) {
  using namespace std::string_view_literals;
  for (const std::string_view magic : {"\xfd\x37zXZ"sv, "BZh"sv, "PK\x03\x04"sv})
    SB_USER_CHECK(!text.starts_with(magic),
                  "{}: is compressed in an unsupported format; decompress it first, or use .gz or .zst", path);
  SB_USER_CHECK(!text.starts_with("PAR1"),
                "{}: is a Parquet file; convert it to JSONL first, for example with datasets.Dataset.to_json", path);
  const size_t first = text.find_first_not_of(" \t\r\n");
  SB_USER_CHECK(first == std::string_view::npos || text[first] != '[',
                "{}: is a JSON array; JSONL has one object per line, as `jq -c '.[]'` writes it", path);
}

class TokenizeJob {
 public:
  TokenizeJob(const TokenizeOptions& options, const std::function<void(const TokenizeProgress&)>& report)
      : options_(options),
        report_(report),
        tokenizer_(Tokenizer::load(options.tokenizer)),
        encoder_(tokenizer_, options.documents),
        pool_(std::max(1, options.workers)) {
    SB_USER_CHECK(!options.inputs.empty(), "no input files were given");
    for (const std::string& path : options.inputs) {
      SB_USER_CHECK(!std::filesystem::is_directory(path), "{}: is a directory; name the files in it, for example {}",
                    path, (std::filesystem::path(path) / "*.jsonl").string());
      const MappedFile file(path);
      SB_USER_CHECK(file.size() > 0, "{}: is empty: there is nothing to tokenize", path);
      refuse_other_formats(path, file.text());
      const std::unique_ptr<TextStream> text = open_text(path);
      refuse_other_formats(path, text->next(1));  // a JSON array may be compressed, too
      sizes_.push_back(file.size());
      most_text_.push_back(text->packed() ? kMostText : file.size());
      // As JSON has it, which cannot hold other names.
      names_.push_back(replace_invalid_utf8(path));
      progress_.total_bytes += file.size();
    }
    const MappedFile tokenizer(options.tokenizer);
    tokenizer_checksum_ = crc32c(0, tokenizer.data(), static_cast<size_t>(tokenizer.size()));
    TokenWriter::Options writing;
    writing.type = tokenizer_.vocab_size() <= 65536 ? TokenType::u16 : TokenType::i32;
    writing.resume = !options.restart;
    writing.overwrite = options.overwrite;
    writing.origin = write_token_origin(origin_of(tokenizer_));
    writer_ = std::make_unique<TokenWriter>(options.output, writing);
    if (!writer_->note().empty()) restore();
  }

  TokenizeProgress run() {
    for (; !writer_->finished() && file_ < options_.inputs.size();
         ++file_, offset_ = 0, line_number_ = 0, done_in_file_ = 0)
      run_file();
    if (!writer_->finished()) {
      SB_USER_CHECK(writer_->documents() > 0, "{}: no line could be turned into a document; {} lines were bad",
                    options_.inputs.front(), progress_.bad_lines);
      writer_->checkpoint(note());
      writer_->finish();
    }
    update_progress();
    return progress_;
  }

 private:
  // What must be equal for an interrupted run to be continued. Bad lines may be skipped from here on: the ones before
  // were good.
  json identity() const {
    return {{"inputs", names_},
            {"sizes", sizes_},
            {"tokenizer", replace_invalid_utf8(options_.tokenizer)},
            {"tokenizer_crc32c", tokenizer_checksum_},
            {"vocab_size", tokenizer_.vocab_size()},
            {"append_eod", options_.documents.append_eod},
            {"end_completions", options_.documents.end_completions},
            {"eod_token", options_.documents.eod_token},
            {"special", options_.documents.add_special_tokens},
            {"text_key", options_.text_key}};
  }
  std::string note() const {
    return json{{"identity", identity()},   {"file", file_},
                {"offset", offset_},        {"line", line_number_},
                {"crc32c", done_checksum_}, {"bad_lines", progress_.bad_lines}}
        .dump();
  }
  void restore() {
    try {
      const json note = json::parse(writer_->note());
      SB_USER_CHECK(note.at("identity") == identity(),
                    "{}.partial belongs to a run with other inputs or options; pass the same ones to resume it, or "
                    "start over with --restart",
                    options_.output);
      const auto number = [&](const char* key, int64_t most) {
        const json& value = note.at(key);
        SB_USER_CHECK(
            value.is_number_integer() && value >= 0 && value <= most,
            "{}.partial/state.json: damaged: \"{}\" must be an integer from 0 to {}; start over with --restart",
            options_.output, key, most);
        return value.get<int64_t>();
      };
      file_ = static_cast<size_t>(number("file", std::ssize(sizes_)));
      offset_ = static_cast<size_t>(number("offset", file_ < sizes_.size() ? most_text_[file_] : 0));
      const int64_t lines = std::ranges::max(most_text_) == kMostText ? kMostText : progress_.total_bytes;
      line_number_ = number("line", lines);
      progress_.bad_lines = number("bad_lines", lines);
      compare_input(static_cast<uint32_t>(number("crc32c", UINT32_MAX)));
    } catch (const json::exception& problem) {
      throw UserError("{}.partial/state.json: damaged ({}); start over with --restart", options_.output,
                      printable(problem.what(), 200));
    }
    update_progress();
    progress_.resumed_bytes = progress_.bytes;
  }

  // What was read so far must still be what is there: text that changed under the same size would be mixed with the
  // tokens of the old.
  void compare_input(uint32_t expected) {
    for (size_t f = 0; f < file_ || (f == file_ && offset_ > 0); ++f) {
      const std::unique_ptr<TextStream> file = open_text(options_.inputs[f]);
      const auto end = f < file_ ? static_cast<size_t>(kMostText) : offset_;
      const size_t done = skip(*file, end);
      SB_USER_CHECK(f < file_ || done == end, "{}: its size changed", options_.inputs[f]);
      done_in_file_ = file->position();
    }
    SB_USER_CHECK(done_checksum_ == expected,
                  "{}.partial was made from other text: {} has changed since; start over with --restart",
                  options_.output, fmt::join(touched(), " or "));
  }
  // Reads on to `end` without tokenizing, for the checksum; says where it came to.
  size_t skip(TextStream& file, size_t end) {
    size_t done = 0;
    while (done < end) {
      const std::string_view text = file.next(std::min(kBatchBytes, end - done));
      if (text.empty()) break;
      done_checksum_ = crc32c(done_checksum_, text.data(), text.size());
      done += text.size();
    }
    return done;
  }
  // The inputs that were read at least in part.
  std::span<const std::string> touched() const {
    return std::span(options_.inputs).first(std::min(options_.inputs.size(), file_ + (offset_ > 0 ? 1 : 0)));
  }

  void run_file() {
    const std::string& path = options_.inputs[file_];
    SB_USER_CHECK(MappedFile(path).size() == sizes_[file_], "{}: its size changed while it was read", path);
    const std::unique_ptr<TextStream> file = open_text(path);
    const uint32_t before = done_checksum_;
    skip(*file, offset_);
    done_checksum_ = before;  // which has it already
    std::vector<Line> batch;
    while (true) {
      batch.clear();
      const std::string_view piece = file->next(kBatchBytes * static_cast<size_t>(pool_.threads()));
      if (piece.empty()) return;
      size_t offset = 0;
      for (std::string_view text; next_line(piece, offset, text);) {
        ++line_number_;
        if (!is_blank(text)) batch.push_back({text, line_number_, {}, {}});
      }
      encode(batch);
      write(path, batch);
      done_checksum_ = crc32c(done_checksum_, piece.data(), piece.size());
      done_in_file_ = file->position();
      offset_ += piece.size();
      update_progress();
      if (std::chrono::duration<double>(Clock::now() - last_checkpoint_).count() >= options_.checkpoint_seconds) {
        writer_->checkpoint(note());
        last_checkpoint_ = Clock::now();
      }
      report_(progress_);
    }
  }

  void encode(std::vector<Line>& batch) {
    pool_.parallel_for(static_cast<int64_t>(batch.size()), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        Line& line = batch[static_cast<size_t>(i)];
        try {
          line.document = encoder_.encode(parse_jsonl_record(line.text, options_.text_key));
        } catch (const UserError& error) {
          line.error = error.what();
        }
      }
    });
  }

  void write(const std::string& path, const std::vector<Line>& batch) {
    for (const Line& line : batch) {
      if (line.error.empty()) {
        writer_->add(line.document.tokens, line.document.targets);
        continue;
      }
      SB_USER_CHECK(options_.skip_bad_lines, "{}:{}: {} (--skip-bad-lines skips such lines and counts them)", path,
                    line.number, line.error);
      if (++progress_.bad_lines <= kShownBadLines) log::warning("skipped {}:{}: {}", path, line.number, line.error);
    }
  }

  void update_progress() {
    progress_.bytes = done_in_file_;
    for (size_t f = 0; f < file_; ++f) progress_.bytes += sizes_[f];
    if (writer_->finished()) progress_.bytes = progress_.total_bytes;
    progress_.documents = writer_->documents();
    progress_.tokens = writer_->tokens();
  }

  const TokenizeOptions& options_;
  const std::function<void(const TokenizeProgress&)>& report_;
  Tokenizer tokenizer_;
  DocumentEncoder encoder_;
  ThreadPool pool_;
  std::unique_ptr<TokenWriter> writer_;
  std::vector<int64_t> sizes_, most_text_;  // of the inputs: bytes, and of their text at most
  std::vector<std::string> names_;
  uint32_t tokenizer_checksum_ = 0, done_checksum_ = 0;  // of the tokenizer's file; of the input that was read
  size_t file_ = 0;
  size_t offset_ = 0;         // in its text
  int64_t done_in_file_ = 0;  // bytes of the file itself
  int64_t line_number_ = 0;
  TokenizeProgress progress_;
  Clock::time_point last_checkpoint_ = Clock::now();
};

}  // namespace

TokenizeProgress tokenize_files(const TokenizeOptions& options,
                                const std::function<void(const TokenizeProgress&)>& progress) {
  return TokenizeJob(options, progress).run();
}

}  // namespace sb
