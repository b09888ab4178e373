#include "model/tensors/tensor_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/files/regular_file.h"
#include "core/utf8.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::map<std::string, std::string> read_weight_map(const fs::path& index) {
  const std::string text = read_regular_file(index);
  Json parsed;
  try {
    parsed = Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
      SB_USER_CHECK(depth <= 8, "{}: nested too deep for an index", index.string());
      return true;
    });
  } catch (const Json::exception& error) {
    throw UserError("{}: not valid JSON: {}", index.string(), std::string_view(error.what()).substr(0, 200));
  }
  SB_USER_CHECK(parsed.is_object() && parsed.contains("weight_map") && parsed["weight_map"].is_object(),
                "{}: no weight_map in it", index.string());
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : parsed["weight_map"].items()) {
    // A plain name: an index may not point outside its directory.
    const std::string shard = value.is_string() ? value.get<std::string>() : "";
    SB_USER_CHECK(shard.ends_with(".safetensors") && shard.find('/') == std::string::npos,
                  "{}: weight_map: tensor '{}' must name a .safetensors file next to the index", index.string(), name);
    files.emplace(name, shard);
  }
  return files;
}

}  // namespace

std::string tensor_file_name(const std::string& stem, int number, int count) {
  return count == 1 ? stem + ".safetensors" : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, number, count);
}

std::string tensor_index_name(const std::string& stem) {
  return stem + ".safetensors.index.json";
}

TensorFiles::TensorFiles(fs::path directory, const std::string& stem) : directory_(std::move(directory)) {
  const std::string single = tensor_file_name(stem, 1, 1), index = tensor_index_name(stem);
  if (!fs::exists(directory_ / single)) {
    SB_USER_CHECK(fs::exists(directory_ / index), "{}: neither {} nor {} is there", directory_.string(), single, index);
    places_ = read_weight_map(directory_ / index);
    return;
  }
  auto file = std::make_unique<SafetensorsFile>(directory_ / single);
  for (const SafetensorsEntry& entry : file->header().entries) places_.emplace(entry.name, single);
  files_.emplace(single, std::move(file));
}

const SafetensorsFile& TensorFiles::file_of(const std::string& tensor) {
  const std::string& name = places_.at(tensor);
  std::unique_ptr<SafetensorsFile>& file = files_[name];
  if (!file) file = std::make_unique<SafetensorsFile>(directory_ / name);
  return *file;
}

const SafetensorsEntry& TensorFiles::entry(const std::string& tensor) {
  const SafetensorsFile& file = file_of(tensor);
  const SafetensorsEntry* entry = file.find(tensor);
  SB_USER_CHECK(entry, "{}: tensor '{}' is not there, though the index says so", file.path().string(),
                printable(tensor, 120));
  return *entry;
}

void write_tensor_index(const fs::path& file, const std::map<std::string, std::string>& places, int64_t total_bytes) {
  const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", places}};
  write_new_file(file, index.dump(2) + "\n");
}

}  // namespace sb
