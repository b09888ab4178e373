#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

namespace sb {

// A Chrome trace (chrome://tracing, ui.perfetto.dev) of where the time of a run went: complete events on one track.
// Written as they come; the format allows the closing bracket to be missing, so a killed run leaves a readable file.
class TraceWriter {
 public:
  // An empty path: every call does nothing.
  explicit TraceWriter(const std::filesystem::path& file);
  ~TraceWriter();

  // The time from construction to destruction is one event. Spans of one writer must nest.
  class Span {
   public:
    Span(TraceWriter& writer, const char* name, int64_t argument) : writer_(writer), name_(name), argument_(argument) {
      if (writer_.stream_) begin_ = std::chrono::steady_clock::now();
    }
    ~Span() {
      if (writer_.stream_) writer_.complete(name_, argument_, begin_);
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
  void flush();

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void complete(const char* name, int64_t argument, std::chrono::steady_clock::time_point begin);

  std::unique_ptr<std::FILE, Closer> stream_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace sb
