#include "plan/latency/profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "plan/latency/measured_profiles.h"

namespace sb {
namespace {

// The analytic profiles are one set of rates, scaled.
struct AnalyticDevice {
  const char* name;
  double rate;
  double peak_tflops;
  int64_t memory_gib;
  double bytes_per_us;  // of memory: seven eighths of what the maker states
};
constexpr AnalyticDevice kDevices[] = {{"h200-analytic", 1.0, 989, 139, 4.2e6},
                                       {"h100-analytic", 1.0, 989, 79, 2.9e6},
                                       {"a100-analytic", 0.33, 312, 79, 1.75e6},
                                       {"h20-analytic", 0.15, 148, 95, 3.5e6}};
constexpr double kProcessorBytesPerUs = 2e4;  // a machine without a known peak: a CPU

double memory_rate(double peak_tflops, int64_t memory_bytes) {
  const AnalyticDevice* nearest = nullptr;
  const auto distance = [&](const AnalyticDevice& device) {
    return std::abs((device.memory_gib << 30) - memory_bytes);
  };
  for (const AnalyticDevice& device : kDevices)
    if (std::abs(peak_tflops - device.peak_tflops) < 0.1 * device.peak_tflops &&
        (nearest == nullptr || distance(device) < distance(*nearest)))
      nearest = &device;
  if (nearest != nullptr) return nearest->bytes_per_us;
  return peak_tflops > 0 ? kDevices[0].bytes_per_us * peak_tflops / kDevices[0].peak_tflops : kProcessorBytesPerUs;
}

// Microseconds per unit as a straight line through the origin.
OperationTable proportional(Coordinate along, double us_per_unit) {
  constexpr double far = 1e6;
  return {along, {{0.0, far}, {0.0, far * us_per_unit}}, 0, 0, 0};
}

int64_t channels_of(const ModelShape& shape, int64_t score_channels) {
  return std::min(score_channels, shape.head_dim / 2 * 2);
}

// `forward`: of a pair. `us`: a FLOP at 1 TFLOP/s.
OperationTable analytic_selection(const ModelShape& shape, const AttentionSpec& spec, double forward, double us) {
  // By planes: the products of the group's mean query with every key, over the channels that count.
  constexpr double kPlanesTflops = 300;
  const int64_t products = shape.kv_heads * channels_of(shape, spec.score_channels);
  if (spec.score_channels > 0)
    return proportional(Coordinate::scores, 2.0 * static_cast<double>(products) / kPlanesTflops * us);
  OperationTable selection = proportional(Coordinate::pairs, 0.02 * forward);
  // That is with whole blocks. A score takes what a pair of the forward does: two products of a head's width. Of every
  // block's scores one is paid for.
  if (spec.score_tokens > 0)
    selection.per_score = forward * (1.0 - static_cast<double>(spec.score_tokens) / static_cast<double>(spec.block));
  return selection;
}

std::string selected_by(const std::string& pattern, const std::string& score, int64_t channels) {
  return channels > 0 ? fmt::format("{} by {} of {} channels", pattern, score, channels)
                      : fmt::format("{} by {}", pattern, score);
}

}  // namespace

const char* operation_name(Operation operation) {
  constexpr const char* names[kOperations] = {"linear_forward",     "linear_backward", "attention_forward",
                                              "attention_backward", "selection",       "head_forward",
                                              "head_backward"};
  return names[static_cast<int>(operation)];
}

ErrorSummary summarize_errors(std::vector<double> errors) {
  if (errors.empty()) return {};
  std::sort(errors.begin(), errors.end());
  const auto at = [&](double q) {
    const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(errors.size())));
    return errors[std::clamp<size_t>(rank, 1, errors.size()) - 1];
  };
  return {at(0.5), at(0.95), static_cast<int64_t>(errors.size())};
}

std::vector<std::string> analytic_profiles() {
  std::vector<std::string> names;
  for (const auto& device : kDevices) names.emplace_back(device.name);
  return names;
}

bool is_analytic_profile(const std::string& name) {
  return std::any_of(std::begin(kDevices), std::end(kDevices), [&](const auto& device) { return device.name == name; });
}

void assume_prefix(Profile& profile) {
  constexpr double kReadAndWritten = 2, kSumBytes = 4;
  const double numbers = 2.0 * static_cast<double>(profile.shape.kv_heads * profile.shape.head_dim);  // key and value
  profile.prefix_measured = false;
  for (OperationTable& table : profile.tables) table.per_prefix = 0;
  profile.tables[static_cast<size_t>(Operation::attention_backward)].per_prefix =
      kReadAndWritten * kSumBytes * numbers / memory_rate(profile.peak_tflops, profile.memory_bytes);
}

Profile analytic_profile(const std::string& name, const ModelShape& shape, const AttentionSpec& spec) {
  const auto* device =
      std::find_if(std::begin(kDevices), std::end(kDevices), [&](const auto& d) { return d.name == name; });
  SB_USER_CHECK(device != std::end(kDevices), "unknown analytic profile `{}`; choose from {}", name,
                fmt::join(analytic_profiles(), ", "));
  const double us = 1e6 / (1e12 * device->rate);  // microseconds per FLOP at 1 TFLOP/s
  const auto h = static_cast<double>(shape.hidden);
  const double linear = 2.0 * static_cast<double>(shape.layer_parameters()) /
                        (shape.hidden >= 2048   ? 600.0
                         : shape.hidden >= 1024 ? 530.0
                                                : 450.0) *
                        us;
  const bool wide = shape.head_dim >= 128;
  const double attention_flops = 4.0 * static_cast<double>(shape.head_dim * shape.heads);
  const double forward = attention_flops / (wide ? 480.0 : 340.0) * us;
  const double backward = 2.5 * attention_flops / (wide ? 400.0 : 310.0) * us;
  const double head = 2.0 * h * static_cast<double>(shape.vocabulary) / 600.0 * us;
  Profile profile;
  profile.name = name;
  profile.machine = fmt::format("analytic, {} TFLOP/s peak", device->peak_tflops);
  profile.shape = shape;
  profile.recompute = "none";
  const auto set = [&](Operation operation, OperationTable table) {
    profile.tables[static_cast<size_t>(operation)] = std::move(table);
  };
  set(Operation::linear_forward, proportional(Coordinate::tokens, linear));
  set(Operation::linear_backward, proportional(Coordinate::tokens, 2 * linear));
  set(Operation::attention_forward, proportional(Coordinate::pairs, forward));
  set(Operation::attention_backward, proportional(Coordinate::pairs, backward));
  set(Operation::selection, analytic_selection(shape, spec, forward, us));
  set(Operation::head_forward, proportional(Coordinate::tokens, head));
  set(Operation::head_backward, proportional(Coordinate::tokens, 2 * head));
  profile.links = assumed_links(name.starts_with("a100") ? "a100" : "h100");
  profile.peak_tflops = device->peak_tflops;
  profile.memory_bytes = device->memory_gib << 30;
  assume_prefix(profile);
  return profile;
}

Profile find_profile(const std::string& name_or_path, const ModelShape& shape, const AttentionSpec& spec,
                     int64_t lora_rank) {
  if (is_analytic_profile(name_or_path)) return analytic_profile(name_or_path, shape, spec);
  std::vector<std::string> built_in = analytic_profiles(), measured_shapes;
  std::optional<Profile> found;
  for (const MeasuredProfile& measured : measured_profiles()) {
    if (std::find(built_in.begin(), built_in.end(), measured.name) == built_in.end()) built_in.push_back(measured.name);
    if (measured.name != name_or_path) continue;
    Profile profile = parse_profile(measured.json, name_or_path);
    if (profile.lora_rank != 0 && profile.lora_rank != lora_rank) continue;
    if (profile.lora_rank == 0) measured_shapes.push_back(profile.shape.name);
    if (!same_sizes(profile.shape, shape) || (found && found->lora_rank == lora_rank)) continue;
    profile.name = name_or_path;
    profile.shape = shape;  // the file does not say whether embedding and head are one matrix
    found = std::move(profile);
  }
  if (found) return *found;
  SB_USER_CHECK(measured_shapes.empty(),
                "profile `{}` was measured for {}, not for {} ({}); use {}-analytic, or run `sparsebalance profile` "
                "for this model",
                name_or_path, fmt::join(measured_shapes, ", "), shape.name, describe(shape), name_or_path);
  std::error_code unknown;
  SB_USER_CHECK(
      std::filesystem::exists(name_or_path, unknown) || unknown,
      "unknown profile `{}`; it is neither built in ({}) nor a readable file; `sparsebalance profile` writes one",
      name_or_path, fmt::join(built_in, ", "));
  Profile profile = parse_profile(read_regular_file(name_or_path), name_or_path);
  profile.name = name_or_path;  // where it lies now
  SB_USER_CHECK(
      same_sizes(profile.shape, shape),
      "{}: measured for another model shape ({}), not for {} ({}); run `sparsebalance profile` for this model",
      name_or_path, describe(profile.shape), shape.name, describe(shape));
  profile.shape = shape;
  return profile;
}

void check_measured_blocks(const Profile& profile, const AttentionSpec& spec, const std::array<const char*, 3>& names) {
  if (!profile.attention) return;
  const Profile::Attention& measured = *profile.attention;
  const auto check = [&](const char* name, const char* option, int64_t then, int64_t now, bool same) {
    SB_USER_CHECK(
        same,
        "{}: was measured with {} {}, but {} is {}; measure again with `sparsebalance profile {} {}`, or set {} to {}",
        profile.name, option, then, name, now, option, now, name, then);
  };
  const auto part = [](int64_t score_tokens, int64_t block) { return score_tokens == 0 ? block : score_tokens; };
  check(names[0], "--block", measured.block, spec.block, measured.block == spec.block);
  check(names[1], "--query-block", measured.query_block, spec.query_block, measured.query_block == spec.query_block);
  check(names[2], "--score-tokens", measured.score_tokens, spec.score_tokens,
        measured.score != spec.score ||
            part(measured.score_tokens, measured.block) == part(spec.score_tokens, spec.block));
}

std::string selected_otherwise(const Profile& profile, const AttentionSpec& spec) {
  if (!profile.attention) return {};
  const Profile::Attention& measured = *profile.attention;
  const int64_t then = channels_of(profile.shape, measured.score_channels),
                now = channels_of(profile.shape, spec.score_channels);
  if (measured.pattern == spec.pattern && measured.score == spec.score && then == now) return {};
  // What `profile` can measure.
  const bool measurable = spec.pattern == "topk" || spec.pattern == "mass";
  return fmt::format(
      "was measured with pairs selected with {}, not with {}: the time for selection is predicted as measured{}",
      selected_by(measured.pattern, measured.score, then), selected_by(spec.pattern, spec.score, now),
      measurable ? "; run `sparsebalance profile` to measure it" : "");
}

AttentionSpec as_measured(const Profile& profile, AttentionSpec spec) {
  if (!profile.attention) return spec;
  const Profile::Attention& measured = *profile.attention;
  if (measured.score != spec.score) spec.score_tokens = measured.score_tokens;
  spec.pattern = measured.pattern;
  spec.score = measured.score;
  spec.score_channels = measured.score_channels;
  return spec;
}

}  // namespace sb
