#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "core/files/record_file.h"

namespace sb {

// A Chrome trace (chrome://tracing, ui.perfetto.dev) of where the time of a run went: complete events, one process a
// rank. Every rank collects its own; rank 0 writes all of them into one file as they come. The format allows the
// closing bracket to be missing, so a killed run leaves a readable file.
class TraceWriter {
 public:
  // Not enabled: every call does nothing. `file` is rank 0's, and empty on the others. `label` is shown with the rank.
  // Times count from here, so that all ranks should get here together. The file is created when there are events to
  // write: a run that fails before leaves none behind.
  TraceWriter(bool enabled, const std::filesystem::path& file, int rank, const std::string& label);
  ~TraceWriter();

  // The time from construction to destruction is one event. Spans of one writer must nest.
  class Span {
   public:
    Span(TraceWriter& writer, const char* name, int64_t argument) : writer_(writer), name_(name), argument_(argument) {
      if (writer_.enabled_) begin_ = std::chrono::steady_clock::now();
    }
    ~Span() {
      if (writer_.enabled_) writer_.complete(name_, argument_, begin_, std::chrono::steady_clock::now());
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    TraceWriter& writer_;
    const char* name_;
    int64_t argument_;
    std::chrono::steady_clock::time_point begin_;
  };
  // `name` is one of the program's own words and needs no escaping; `argument` is shown with the event (the step, the
  // micro-batch).
  [[nodiscard]] Span span(const char* name, int64_t argument) { return Span(*this, name, argument); }
  // The same for an operation that is over.
  void complete(const char* name, int64_t argument, std::chrono::steady_clock::time_point begin,
                std::chrono::steady_clock::time_point end);

  bool enabled() const { return enabled_; }
  // What was written to; empty: nothing.
  std::filesystem::path written() const { return file_ ? path_ : std::filesystem::path(); }
  // This rank's events since the last call, and writing those of all ranks.
  std::string take();
  void write(std::span<const std::string> events);
  // Writes the rest and the end of the file; the destructor does it otherwise, and can only warn of what went wrong.
  void finish();

 private:
  bool enabled_;
  std::filesystem::path path_;
  int rank_;
  std::string events_;  // each begins with the comma after the one before
  bool measured_ = false, begun_ = false, finished_ = false;
  std::optional<RecordFile> file_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace sb
