#include "data/length_statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kQuantiles[] = {0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999};

// 12,345,678
std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string bar(double share, int width) {
  const char* const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto units = static_cast<int>(std::lround(share * width * 8));
  std::string text;
  for (int i = 0; i < units / 8; ++i) text += "█";
  return text + eighths[units % 8];
}

}  // namespace

LengthStatistics measure_lengths(std::vector<int64_t> lengths) {
  SB_CHECK(!lengths.empty());
  std::sort(lengths.begin(), lengths.end());
  SB_CHECK(lengths.front() >= 0);
  LengthStatistics s;
  s.sequences = static_cast<int64_t>(lengths.size());
  s.shortest = lengths.front();
  s.longest = lengths.back();
  const auto class_of = [](int64_t length) { return std::bit_width(static_cast<uint64_t>(length)); };
  const int first = class_of(s.shortest), last = class_of(s.longest);
  for (int c = first; c <= last; ++c)
    s.classes.push_back({c == 0 ? 0 : int64_t{1} << (c - 1), int64_t{1} << c, 0, 0, 0.0});
  for (int64_t length : lengths) {
    LengthClass& c = s.classes[static_cast<size_t>(class_of(length) - first)];
    const double squared = static_cast<double>(length) * static_cast<double>(length);
    ++c.sequences;
    c.tokens += length;
    c.attention += squared;
    s.tokens += length;
    s.attention += squared;
  }
  s.mean = static_cast<double>(s.tokens) / static_cast<double>(s.sequences);
  for (double at : kQuantiles) {
    const auto rank = static_cast<size_t>(std::ceil(at * static_cast<double>(lengths.size())));
    s.quantiles.push_back({at, lengths[std::max<size_t>(rank, 1) - 1]});
  }
  return s;
}

std::string format_length_statistics(const LengthStatistics& s, int width) {
  std::string text = fmt::format("{} sequences, {} tokens; length {} to {}, mean {:.1f}\n", grouped(s.sequences),
                                 grouped(s.tokens), grouped(s.shortest), grouped(s.longest), s.mean);
  text += "quantiles:";
  for (const auto& q : s.quantiles) text += fmt::format("  {:g}% {}", 100.0 * q.at, grouped(q.length));
  text += "\n\n";
  text += fmt::format("{:>21} {:>12} {:>9} {:>8} {:>10}\n", "length", "sequences", "share", "tokens", "attention");
  double peak = 0.0;
  for (const LengthClass& c : s.classes) peak = std::max(peak, static_cast<double>(c.sequences));
  const auto percent = [](double part, double whole) { return whole > 0.0 ? 100.0 * part / whole : 0.0; };
  const int bars = std::max(10, width - 66);
  for (const LengthClass& c : s.classes)
    text +=
        fmt::format("{:>9} - {:>9} {:>12} {:>8.2f}% {:>7.2f}% {:>9.2f}% {}\n", grouped(c.from), grouped(c.to - 1),
                    grouped(c.sequences), percent(static_cast<double>(c.sequences), static_cast<double>(s.sequences)),
                    percent(static_cast<double>(c.tokens), static_cast<double>(s.tokens)),
                    percent(c.attention, s.attention), bar(static_cast<double>(c.sequences) / peak, bars));
  return text;
}

std::string length_statistics_json(const LengthStatistics& s) {
  nlohmann::ordered_json out = {{"sequences", s.sequences},
                                {"tokens", s.tokens},
                                {"shortest", s.shortest},
                                {"longest", s.longest},
                                {"mean", s.mean},
                                {"quantiles", nlohmann::json::object()},
                                {"classes", nlohmann::json::array()}};
  for (const auto& q : s.quantiles) out["quantiles"][fmt::format("{:g}", q.at)] = q.length;
  for (const LengthClass& c : s.classes)
    out["classes"].push_back(
        {{"from", c.from},
         {"to", c.to},
         {"sequences", c.sequences},
         {"tokens", c.tokens},
         {"token_share", s.tokens > 0 ? static_cast<double>(c.tokens) / static_cast<double>(s.tokens) : 0.0},
         {"attention_share", s.attention > 0.0 ? c.attention / s.attention : 0.0}});
  return out.dump(2);
}

}  // namespace sb
