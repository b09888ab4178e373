#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "model/tensors/safetensors.h"

namespace sb {

// Tensors of a folder by name, laid out as Hugging Face does: all in STEM.safetensors, or in several files, of which
// STEM.safetensors.index.json says which one holds what. A file is opened when something of it is asked for.
class TensorFiles {
 public:
  // UserError when there is neither, or when the index is damaged.
  TensorFiles(std::filesystem::path directory, const std::string& stem);

  // Tensor → name of its file.
  const std::map<std::string, std::string>& places() const { return places_; }
  // The file that places() has for this tensor, and the tensor's entry there. UserError when it is not in it.
  const SafetensorsFile& file_of(const std::string& tensor);
  const SafetensorsEntry& entry(const std::string& tensor);

 private:
  std::filesystem::path directory_;
  std::map<std::string, std::string> places_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
};

// "model.safetensors" of one; "model-00002-of-00008.safetensors" of several, counted from 1.
std::string tensor_file_name(const std::string& stem, int number, int count);
std::string tensor_index_name(const std::string& stem);
// The index of several such files.
void write_tensor_index(const std::filesystem::path& file, const std::map<std::string, std::string>& places,
                        int64_t total_bytes);

}  // namespace sb
