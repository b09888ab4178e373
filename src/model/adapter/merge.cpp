#include "model/adapter/merge.h"

#include <algorithm>
#include <vector>

#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "model/stage/stage.h"

namespace sb {

void merge_adapter(ThreadPool& pool, const MergeOptions& options, const std::filesystem::path& directory) {
  const PeftAdapter adapter(options.adapter, options.config);
  StageOptions whole;
  whole.last_layer = options.config.layers;
  const std::vector<FlatTensor> tensors = Stage::declare_parameters(options.config, whole).flat_tensors();
  HfTensors base(options.base, tensors);
  std::vector<float> buffer;
  std::vector<SafetensorsTensor> merged;
  for (const FlatTensor& tensor : tensors) {
    merged.push_back({tensor.name, tensor.shape, nullptr, [&] {
                        buffer.resize(static_cast<size_t>(tensor.end - tensor.begin));
                        base.read(tensor, buffer.data());
                        adapter.merge(pool, tensor.name, tensor.shape, buffer.data());
                        return buffer.data();
                      }});
  }
  HfWriteOptions write;
  const bool all_bf16 = std::ranges::all_of(tensors, [&](const FlatTensor& tensor) { return base.is_bf16(tensor); });
  write.dtype = options.dtype.value_or(all_bf16 ? DType::bf16 : DType::f32);
  write.copy_from = options.base;
  write_hf_model(directory, options.config, merged, write);
}

}  // namespace sb
