#include "train/optimizer_file.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/errors.h"
#include "model/safetensors.h"

namespace sb {
namespace {

struct Piece {
  std::string name;
  std::vector<int64_t> shape;
  std::span<float> data;
};

// The rows of the flat moment buffers that belong to each Hugging Face tensor.
std::vector<Piece> pieces(const ParameterSet& parameters, TensorView first_moment, TensorView second_moment) {
  SB_CHECK(first_moment.elements() == parameters.flat_elements() && second_moment.elements() == first_moment.elements(),
           "moments of {} and {} elements for {} parameters", first_moment.elements(), second_moment.elements(),
           parameters.flat_elements());
  std::vector<Piece> result;
  for (const auto& [prefix, moment] : {std::pair{"exp_avg.", first_moment}, std::pair{"exp_avg_sq.", second_moment}}) {
    for (int i = 0; i < parameters.count(); ++i) {
      const Parameter& parameter = parameters.parameter(i);
      const int64_t row = parameter.elements() / parameter.shape[0];
      for (const Parameter::Part& part : parameter.parts) {
        const int64_t rows = part.row_end - part.row_begin;
        std::vector<int64_t> shape = {rows};
        for (int d = 1; d < parameter.shape.rank(); ++d) shape.push_back(parameter.shape[d]);
        float* data = moment.f32() + parameter.offset + part.row_begin * row;
        result.push_back({prefix + part.hf_name, std::move(shape), {data, static_cast<size_t>(rows * row)}});
      }
    }
  }
  return result;
}

}  // namespace

void write_optimizer_file(const std::filesystem::path& file, const ParameterSet& parameters, TensorView first_moment,
                          TensorView second_moment) {
  std::vector<SafetensorsTensor> tensors;
  for (const Piece& piece : pieces(parameters, first_moment, second_moment))
    tensors.push_back({piece.name, piece.shape, piece.data.data()});
  write_safetensors(file, tensors, DType::f32);
}

void read_optimizer_file(const std::filesystem::path& file, const ParameterSet& parameters, TensorView first_moment,
                         TensorView second_moment) {
  const SafetensorsFile in(file);
  std::memset(first_moment.raw(), 0, static_cast<size_t>(first_moment.bytes()));
  std::memset(second_moment.raw(), 0, static_cast<size_t>(second_moment.bytes()));
  for (const Piece& piece : pieces(parameters, first_moment, second_moment)) {
    const SafetensorsEntry* entry = in.find(piece.name);
    SB_USER_CHECK(entry != nullptr, "{}: tensor {} is missing: is the checkpoint of another model?", file.string(),
                  piece.name);
    SB_USER_CHECK(entry->shape == piece.shape && entry->dtype == "F32",
                  "{}: tensor {} is {} {}, the model needs F32 [{}]: is the checkpoint of another model?",
                  file.string(), piece.name, entry->dtype, entry->shape_text(), fmt::join(piece.shape, ", "));
    in.read_f32(*entry, piece.data);
  }
}

}  // namespace sb
