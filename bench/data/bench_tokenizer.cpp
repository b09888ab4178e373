// Encoding speed of the tokenizer on English-like text: one thread, then two. `bench_tokenizer [tokenizer.json
// [text]]`.
#include <time.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "core/files/mapped_file.h"
#include "core/random.h"
#include "core/thread_pool.h"
#include "data/tokenizer/tokenizer.h"

namespace {

using Clock = std::chrono::steady_clock;

// Words of a Zipf distribution with a long tail (60,000 of them), common ones being English, in sentences and
// paragraphs, with numbers, names and quotes: the mix of hits and misses that real prose gives the word cache.
std::string english_like(size_t bytes) {
  const std::vector<std::string> common = {
      "the",   "of",    "and",   "to",      "in",    "a",     "is",     "that",   "for",   "it",    "as",
      "was",   "with",  "be",    "by",      "on",    "not",   "he",     "his",    "but",   "at",    "are",
      "this",  "have",  "from",  "they",    "which", "one",   "you",    "had",    "all",   "were",  "when",
      "there", "can",   "been",  "their",   "more",  "if",    "would",  "who",    "will",  "what",  "time",
      "about", "up",    "out",   "some",    "them",  "then",  "into",   "people", "other", "only",  "could",
      "new",   "than",  "first", "water",   "made",  "over",  "after",  "number", "long",  "work",  "years",
      "part",  "place", "where", "through", "well",  "great", "little", "state",  "world", "still", "nation"};
  const std::vector<std::string> syllables = {"con", "ter", "tion", "ing", "ver", "al",   "ment", "pre",
                                              "sta", "ri",  "lo",   "cal", "est", "ness", "ble",  "in",
                                              "un",  "der", "mo",   "gra", "ph",  "er"};
  const size_t words = 60000;
  sb::Random random(11);
  std::vector<std::string> tail;
  for (size_t i = 0; i < words; ++i) {
    std::string word;
    for (uint64_t s = 0, count = 1 + random.below(4); s < count; ++s) word += syllables[random.below(syllables.size())];
    tail.push_back(word);
  }
  std::string text;
  bool sentence_start = true;
  while (text.size() < bytes) {
    const auto rank = static_cast<size_t>(std::exp(random.uniform() * std::log(static_cast<double>(words)))) - 1;
    std::string word = rank < common.size() ? common[rank] : tail[rank % words];
    if (sentence_start || random.below(30) == 0) word[0] = static_cast<char>(word[0] - 'a' + 'A');
    if (!text.empty() && text.back() != '\n') text += ' ';
    if (random.below(60) == 0) text += std::to_string(random.below(3000)) + " ";
    text += word;
    sentence_start = false;
    const uint64_t mark = random.below(60);
    if (mark < 4) text += mark == 0 ? ".\n\n" : ".";
    if (mark < 4) sentence_start = true;
    if (mark >= 4 && mark < 8) text += ",";
    if (mark == 8) text += "'s";
  }
  return text;
}

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Times {
  double wall = 1e9, processor = 1e9;  // of the best pass; the processor's, all threads together, is not hurt by others
};

Times time_encoding(const sb::Tokenizer& tokenizer, const std::vector<std::string_view>& pieces, int threads,
                    int64_t& tokens) {
  sb::ThreadPool pool(threads);
  Times best;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = Clock::now();
    const double processor = processor_seconds();
    const auto ids = tokenizer.encode_batch(pieces, pool);
    best.wall = std::min(best.wall, std::chrono::duration<double>(Clock::now() - start).count());
    best.processor = std::min(best.processor, processor_seconds() - processor);
    tokens = 0;
    for (const auto& piece : ids) tokens += static_cast<int64_t>(piece.size());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : SB_SOURCE_DIR "/tests/data/tokenizer_qwen2_style/tokenizer.json";
  const auto start = Clock::now();
  const sb::Tokenizer tokenizer = sb::Tokenizer::load(path);
  std::printf("load %.0f ms, %lld ids\n", 1e3 * std::chrono::duration<double>(Clock::now() - start).count(),
              static_cast<long long>(tokenizer.vocab_size()));
  std::string text;
  if (argc > 2)
    text = sb::MappedFile(argv[2]).text();
  else
    text = english_like(16 << 20);
  // Documents of about 64 KiB, cut at line ends.
  std::vector<std::string_view> pieces;
  for (std::string_view rest = text; !rest.empty();) {
    size_t end = rest.size() > 65536 ? rest.find('\n', 65536) : rest.size();
    if (end == std::string_view::npos) end = rest.size();
    pieces.push_back(rest.substr(0, end));
    rest.remove_prefix(end);
  }
  int64_t tokens = 0;
  const Times one = time_encoding(tokenizer, pieces, 1, tokens), two = time_encoding(tokenizer, pieces, 2, tokens);
  const double megabytes = static_cast<double>(text.size()) / 1e6;
  std::printf("%.1f MB, %lld tokens (%.2f bytes per token)\n", megabytes, static_cast<long long>(tokens),
              static_cast<double>(text.size()) / static_cast<double>(tokens));
  const auto print = [&](const char* name, const Times& times) {
    std::printf("%s %7.1f MB/s  %6.2f M tokens/s  %7.1f MB per processor second\n", name, megabytes / times.wall,
                static_cast<double>(tokens) / times.wall / 1e6, megabytes / times.processor);
  };
  print("1 thread ", one);
  print("2 threads", two);
  std::printf("ratio 2 threads / 1 thread: %.2f\n", one.wall / two.wall);
}
