#include "plan/simulate/length_pool.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {
namespace {

// Quantiles 0, 1 %, …, 99 %, 99.5 %, 99.8 %, 99.9 %, 100 %.
constexpr int kQuantiles = 104;

// Two peaks, under 4K and over 16K, after the published statistics of a long-context instruction set.
constexpr int64_t kChatQa2[kQuantiles] = {
    128,   141,   153,   168,   184,   203,   221,   243,   267,   295,   324,   353,   384,   421,   463,
    504,   550,   609,   673,   736,   808,   884,   977,   1128,  1300,  1500,  1717,  1984,  2306,  2703,
    3101,  3593,  4156,  4492,  4840,  5142,  5552,  5973,  6434,  6909,  7467,  7990,  8457,  8841,  9282,
    9763,  10243, 10716, 11183, 11681, 12238, 12826, 13482, 14158, 14876, 15760, 16406, 16665, 16935, 17191,
    17449, 17711, 18005, 18309, 18615, 18903, 19199, 19487, 19799, 20103, 20442, 20813, 21170, 21563, 21896,
    22234, 22546, 22907, 23315, 23670, 24033, 24426, 24812, 25187, 25631, 26060, 26467, 26856, 27232, 27685,
    28163, 28578, 29021, 29488, 29967, 30414, 30875, 31335, 31809, 32304, 32554, 32734, 40486, 97535};
// One broad peak between 8K and 72K.
constexpr int64_t kLongAlign[kQuantiles] = {
    8192,  8306,  8415,  8522,  8645,  8779,  8894,  9010,  9129,  9258,  9385,  9507,  9635,  9759,  9874,
    10017, 10152, 10289, 10437, 10587, 10741, 10876, 11031, 11177, 11335, 11502, 11635, 11794, 11933, 12095,
    12260, 12476, 12685, 12903, 13123, 13366, 13592, 13816, 14059, 14324, 14580, 14810, 15056, 15335, 15616,
    15868, 16146, 16428, 16736, 17012, 17384, 17661, 17975, 18274, 18610, 18927, 19265, 19585, 19945, 20292,
    20640, 21025, 21371, 21758, 22137, 22496, 22847, 23282, 23698, 24078, 24443, 25184, 25943, 26783, 27720,
    28554, 29506, 30486, 31420, 32370, 33320, 34544, 35609, 36697, 37821, 39136, 40372, 41796, 42983, 44318,
    45813, 47334, 48801, 51183, 53813, 56667, 59484, 62693, 66141, 69864, 71587, 72865, 73260, 73717};

double share_of(int index) {
  if (index < 100) return index / 100.0;
  constexpr double tail[] = {0.995, 0.998, 0.999, 1.0};
  return tail[index - 100];
}

std::vector<int64_t> from_quantiles(const int64_t (&quantiles)[kQuantiles]) {
  constexpr int count = 20'000;
  std::vector<int64_t> lengths(count);
  int at = 0;
  for (int i = 0; i < count; ++i) {
    const double share = (i + 0.5) / count;
    while (share_of(at + 1) < share) ++at;
    const double part = (share - share_of(at)) / (share_of(at + 1) - share_of(at));
    lengths[static_cast<size_t>(i)] = std::llround(static_cast<double>(quantiles[at]) +
                                                   part * static_cast<double>(quantiles[at + 1] - quantiles[at]));
  }
  return lengths;
}

}  // namespace

std::vector<std::string> named_length_pools() {
  return {"chatqa2-like", "longalign-like"};
}

std::vector<int64_t> parse_lengths(const std::string& text, const std::string& where) {
  std::vector<int64_t> lengths;
  size_t line = 0, begin = 0;
  while (begin < text.size()) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    ++line;
    size_t from = begin, to = end;
    while (from < to && (text[from] == ' ' || text[from] == '\t')) ++from;
    while (to > from && (text[to - 1] == ' ' || text[to - 1] == '\t' || text[to - 1] == '\r')) --to;
    begin = end + 1;
    if (from == to || text[from] == '#') continue;
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(text.data() + from, text.data() + to, value);
    SB_USER_CHECK(error == std::errc() && stop == text.data() + to,
                  "{}:{}: `{}` is not a length (expected one integer per line)", where, line,
                  text.substr(from, std::min<size_t>(to - from, 40)));
    SB_USER_CHECK(value > 0, "{}:{}: a length must be positive, got {}", where, line, value);
    SB_USER_CHECK(value <= INT32_MAX, "{}:{}: a length of {} tokens exceeds the largest budget, {}", where, line, value,
                  INT32_MAX);
    lengths.push_back(value);
  }
  SB_USER_CHECK(!lengths.empty(), "{}: has no lengths", where);
  return lengths;
}

std::vector<int64_t> find_lengths(const std::string& name_or_path) {
  if (name_or_path == "chatqa2-like") return from_quantiles(kChatQa2);
  if (name_or_path == "longalign-like") return from_quantiles(kLongAlign);
  std::error_code unknown;
  SB_USER_CHECK(std::filesystem::exists(name_or_path, unknown) || unknown,
                "unknown length pool `{}`; it is neither a known name ({}) nor a readable file", name_or_path,
                fmt::join(named_length_pools(), ", "));
  return parse_lengths(read_regular_file(name_or_path), name_or_path);
}

LengthSampler::LengthSampler(std::span<const int64_t> pool, uint64_t seed)
    : pool_(pool), random_(seed), order_(pool.size()) {
  SB_CHECK(!pool.empty(), "no lengths to draw from");
  std::iota(order_.begin(), order_.end(), int64_t{0});
  at_ = order_.size();
}

std::vector<Sequence> LengthSampler::next(int64_t count) {
  std::vector<Sequence> sequences(static_cast<size_t>(count));
  for (Sequence& sequence : sequences) {
    if (at_ == order_.size()) {
      for (size_t i = order_.size() - 1; i > 0; --i) std::swap(order_[i], order_[random_.below(i + 1)]);
      at_ = 0;
    }
    sequence.id = drawn_++;
    sequence.tokens = pool_[static_cast<size_t>(order_[at_++])];
  }
  return sequences;
}

}  // namespace sb
