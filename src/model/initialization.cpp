#include "model/initialization.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/random.h"

namespace sb {

uint64_t name_hash(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

namespace {

// Four normal numbers from each Philox block.
void fill_normal(TensorView tensor, float deviation, uint64_t seed, uint64_t stream) {
  float* data = tensor.f32();
  const int64_t count = tensor.elements();
  for (int64_t i = 0; i < count; i += 4) {
    const std::array<uint32_t, 4> bits = Random::block(seed, static_cast<uint64_t>(i / 4), stream);
    float normal[4];
    for (int pair = 0; pair < 2; ++pair) {
      const double radius = std::sqrt(-2.0 * std::log((bits[2 * pair] + 1.0) * 0x1p-32));
      const double angle = 6.283185307179586 * (bits[2 * pair + 1] * 0x1p-32);
      normal[2 * pair] = static_cast<float>(deviation * radius * std::cos(angle));
      normal[2 * pair + 1] = static_cast<float>(deviation * radius * std::sin(angle));
    }
    std::copy_n(normal, std::min<int64_t>(4, count - i), data + i);
  }
}

void fill_uniform(TensorView tensor, double limit, uint64_t seed, uint64_t stream) {
  float* data = tensor.f32();
  for (int64_t i = 0; i < tensor.elements(); i += 4) {
    const std::array<uint32_t, 4> bits = Random::block(seed, static_cast<uint64_t>(i / 4), stream);
    for (int64_t k = 0; k < std::min<int64_t>(4, tensor.elements() - i); ++k)
      data[i + k] = static_cast<float>(limit * ((bits[static_cast<size_t>(k)] + 0.5) * 0x1p-31 - 1.0));
  }
}

bool is_adapter(const Parameter& parameter) {
  return parameter.name.ends_with(".lora_A") || parameter.name.ends_with(".lora_B");
}

void fill(TensorView tensor, float value) {
  std::fill_n(tensor.f32(), tensor.elements(), value);
}

bool is_cut(const Parameter& parameter) {
  return std::ranges::any_of(parameter.parts,
                             [](const Parameter::Part& part) { return part.cut.axis != TensorCut::Axis::none; });
}

// Fills a parameter of which this rank may have a part: `fill_whole` fills what one rank alone would have.
template <typename Fill>
void fill_part_of_whole(const Parameter& parameter, TensorView value, const Fill& fill_whole) {
  if (!is_cut(parameter)) return fill_whole(value);
  std::vector<FlatTensor> parts;
  int64_t rows = 0;
  for (const Parameter::Part& part : parameter.parts) {
    parts.push_back(flat_tensor(parameter, part));
    rows += parts.back().shape[0];
  }
  const int64_t columns = parts[0].shape[1];
  std::vector<float> whole(static_cast<size_t>(rows * columns));
  fill_whole(TensorView(whole.data(), {rows, columns}));
  const float* next = whole.data();
  for (const FlatTensor& part : parts) {
    part.take_part(next, value.f32() + (part.begin - parameter.offset));
    next += part.elements();
  }
}

}  // namespace

void initialize_parameters(ParameterSet& parameters, float deviation, uint64_t seed) {
  const HostCopy values = parameters.host_values();
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    const TensorView value = parameters.part(values.view(), i);
    if (is_adapter(parameter)) continue;
    if (parameter.shape.rank() >= 2) {
      fill_part_of_whole(parameter, value,
                         [&](TensorView whole) { fill_normal(whole, deviation, seed, name_hash(parameter.name)); });
    } else {
      fill(value, parameter.name.ends_with(".bias") ? 0.0f : 1.0f);
    }
  }
  initialize_adapters(parameters, values.view(), seed);
  parameters.store_values(values);
}

void initialize_adapters(const ParameterSet& parameters, const TensorView& values, uint64_t seed) {
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    if (!is_adapter(parameter)) continue;
    const TensorView value = parameters.part(values, i);
    // By the modules' own names: which others are targets does not matter.
    for (const Parameter::Part& part : parameter.parts) {
      const TensorView rows = value.rows(part.row_begin, part.row_end);
      if (!parameter.name.ends_with(".lora_A")) {
        fill(rows, 0.0f);
        continue;
      }
      const FlatTensor tensor = flat_tensor(parameter, part);
      std::vector<float> whole(static_cast<size_t>(tensor.elements()));
      fill_uniform(TensorView(whole.data(), {tensor.shape[0], tensor.shape[1]}),
                   1.0 / std::sqrt(static_cast<double>(tensor.shape[1])), seed, name_hash(part.hf_name));
      tensor.take_part(whole.data(), rows.f32());
    }
  }
}

}  // namespace sb
