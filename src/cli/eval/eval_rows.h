#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/eval/eval_options.h"

// What the benchmarks have in common: files of questions, predictions of others, means.
namespace CLI {
class App;
}

namespace sb {

// Where a benchmark's questions come from, and how many of them count.
struct BenchmarkFiles {
  std::string input, predictions;
  int64_t limit = 0;            // the first so many; 0: all
  bool takes_an_array = false;  // one JSON array instead of lines will do
};
void add_files(CLI::App* command, BenchmarkFiles& files, const char* input_help);

// An object of a file and where it stands: "file:line" of JSONL, "file: question 3" of a JSON array.
struct RowObject;
struct Row {
  std::shared_ptr<const RowObject> object;
  std::string place;

  // UserError with the place where a key is missing or of another type.
  std::string text(const char* key) const;
  std::vector<std::string> texts(const char* key) const;
  // A text, a number or a list of them, as texts.
  std::vector<std::string> values(const char* key) const;
  bool has(const char* key) const;  // and it is not null
};

// The objects of a file; UserError names what is none.
std::vector<Row> read_rows(const BenchmarkFiles& files);
// What the file of predictions says ("pred"), one for each of the rows; of a limit as many as of the questions.
std::vector<std::string> read_predictions(const BenchmarkFiles& files, const std::vector<Row>& rows);

EvalModel open_model_to_run(const EvalOptions& options);

std::string plus_minus(std::optional<double> error);  // " ± 2.20", nothing where it is not known

// Of scores in 0 … 1, in hundredths.
class MeanScore {
 public:
  void add(double score);
  int64_t samples() const { return samples_; }
  double mean() const;
  // Of the mean: how far it would move with other questions of the kind, which one sample does not tell.
  std::optional<double> standard_error() const;
  std::string text() const;  // "41.50 ± 2.20 over 503 samples"
  std::string json() const;  // an object with score, standard_error (may be null) and samples

 private:
  int64_t samples_ = 0;
  double sum_ = 0, squares_ = 0;
};

}  // namespace sb
