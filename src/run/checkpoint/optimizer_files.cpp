#include "run/checkpoint/optimizer_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/errors.h"
#include "device/float16.h"
#include "device/memory.h"
#include "model/tensors/tensor_files.h"

namespace sb {
namespace {

const std::byte* find_values(TensorFiles& files, const std::filesystem::path& checkpoint, const std::string& name,
                             const FlatTensor& tensor) {
  SB_USER_CHECK(files.places().contains(name), "{}: tensor {} is missing; does the checkpoint belong to another model?",
                checkpoint.string(), name);
  const SafetensorsEntry& entry = files.entry(name);
  const SafetensorsFile& file = files.file_of(name);
  SB_USER_CHECK(entry.shape == tensor.shape && entry.dtype == "F32",
                "{}: tensor {} is {} {}, but the model needs F32 [{}]; does the checkpoint belong to another model?",
                file.path().string(), name, entry.dtype, entry.shape_text(), fmt::join(tensor.shape, ", "));
  return file.data(entry).data();
}

// `from`: fp32, which need not be aligned.
void fill(const TensorView& to, const std::byte* from) {
  if (to.dtype() == DType::f32) {
    std::memcpy(to.raw(), from, static_cast<size_t>(to.bytes()));
    return;
  }
  SB_CHECK(to.dtype() == DType::bf16, "moments in {}", dtype_name(to.dtype()));
  auto* bits = static_cast<uint16_t*>(to.raw());
  for (int64_t i = 0; i < to.elements(); ++i) {
    float value;
    std::memcpy(&value, from + i * int64_t{sizeof value}, sizeof value);
    bits[i] = bf16_from_f32(value);
  }
}

}  // namespace

std::string first_moment_name(const std::string& tensor) {
  return "exp_avg." + tensor;
}

std::string second_moment_name(const std::string& tensor) {
  return "exp_avg_sq." + tensor;
}

void read_optimizer_files(const std::filesystem::path& checkpoint, const ParameterSet& parameters,
                          const ShardLayout& layout, int shard, TensorView first_moment, TensorView second_moment) {
  SB_CHECK(first_moment.elements() == layout.shard_elements() && second_moment.elements() == layout.shard_elements(),
           "moments of {} and {} elements for a shard of {}", first_moment.elements(), second_moment.elements(),
           layout.shard_elements());
  TensorFiles files(checkpoint, kOptimizerFiles);
  zero_now(first_moment);
  zero_now(second_moment);
  const HostCopy first_values(first_moment), second_values(second_moment);
  for (const FlatTensor& tensor : parameters.flat_tensors()) {
    const std::byte* first = find_values(files, checkpoint, first_moment_name(tensor.name), tensor);
    const std::byte* second = find_values(files, checkpoint, second_moment_name(tensor.name), tensor);
    std::vector<ShardLayout::Segment> own = layout.segments({tensor.begin, tensor.end});
    std::erase_if(own, [&](const ShardLayout::Segment& segment) { return segment.shard != shard; });
    tensor.each_run([&](int64_t here, int64_t whole, int64_t count) {
      const FlatRange run{tensor.begin + here, tensor.begin + here + count};
      for (const ShardLayout::Segment& segment : own) {
        const int64_t begin = std::max(run.begin, segment.flat.begin), end = std::min(run.end, segment.flat.end);
        if (begin >= end) continue;
        const int64_t from = (whole + begin - run.begin) * int64_t{sizeof(float)};
        const int64_t place = segment.place + begin - segment.flat.begin;
        fill(first_values.view().rows(place, place + end - begin), first + from);
        fill(second_values.view().rows(place, place + end - begin), second + from);
      }
    });
  }
  first_values.store();
  second_values.store();
}

}  // namespace sb
