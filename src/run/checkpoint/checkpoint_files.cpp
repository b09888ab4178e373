#include "run/checkpoint/checkpoint_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/memory_plan.h"
#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "model/tensors/tensor_files.h"
#include "run/checkpoint/new_directory.h"
#include "run/checkpoint/optimizer_files.h"
#include "run/checkpoint/selection_file.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "model";

// One of the parts; what is at `remove` goes when it fails.
template <typename Part>
auto saving(const CheckpointPlace& place, const std::vector<fs::path>& remove, const Part& part) {
  std::string reason;
  try {
    return part();
  } catch (const UserError& error) {
    reason = error.what();
  } catch (const fs::filesystem_error& error) {
    reason = error.what();
  }
  std::error_code ignored;
  for (const fs::path& path : remove) fs::remove_all(path, ignored);
  const fs::space_info space = fs::space(place.output_dir, ignored);
  throw UserError(
      "the checkpoint of step {} could not be saved: {}. {} are free there, and a checkpoint takes {}. Free some "
      "space; {}.",
      place.step, reason, format_bytes(static_cast<int64_t>(space.available)), format_bytes(place.bytes),
      previous_checkpoint_note(place.output_dir));
}

TensorFile write_file(const fs::path& directory, const std::string& stem, const FileNumber& number,
                      const std::vector<SafetensorsTensor>& tensors) {
  TensorFile file;
  file.name = tensor_file_name(stem, number.number, number.count);
  file.stem = stem;
  file.written.checksum = write_safetensors(directory / file.name, tensors, DType::f32);
  file.written.bytes = static_cast<int64_t>(fs::file_size(directory / file.name));
  for (const SafetensorsTensor& tensor : tensors) {
    file.tensors.push_back(tensor.name);
    file.tensor_bytes += tensor.elements() * dtype_bytes(DType::f32);
  }
  return file;
}

// Where there are several files of a kind. Returns whether there are.
bool write_index(const fs::path& directory, const std::string& stem, const std::vector<TensorFile>& files) {
  std::map<std::string, std::string> places;
  int64_t bytes = 0;
  int count = 0;
  for (const TensorFile& file : files) {
    if (file.stem != stem) continue;
    ++count;
    bytes += file.tensor_bytes;
    for (const std::string& tensor : file.tensors) places[tensor] = file.name;
  }
  if (count > 1) write_tensor_index(directory / tensor_index_name(stem), places, bytes);
  return count > 1;
}

void write_state(const fs::path& file, const TrainState& state) {
  const nlohmann::ordered_json json = {{"step", state.step},
                                       {"updates", state.updates},
                                       {"position", state.position},
                                       {"source_state", state.source_state},
                                       {"tokens", state.tokens},
                                       {"skipped", state.skipped},
                                       {"skipped_in_row", state.skipped_in_row},
                                       {"planner_state", state.planner_state},
                                       {"source", state.source},
                                       {"base", state.base}};
  write_new_file(file, json.dump(1) + "\n");
}

}  // namespace

std::string pack_files(const std::vector<TensorFile>& files) {
  nlohmann::json all = nlohmann::json::array();
  for (const TensorFile& file : files)
    all.push_back({file.name, file.stem, file.tensors, file.tensor_bytes, file.written.bytes, file.written.checksum});
  return all.dump();
}

std::vector<TensorFile> unpack_files(const std::string& text) {
  std::vector<TensorFile> files;
  for (const nlohmann::json& file : nlohmann::json::parse(text))
    files.push_back({file[0], file[1], file[2], file[3], {file[4], file[5]}});
  return files;
}

fs::path begin_checkpoint(const CheckpointPlace& place) {
  return saving(place, {}, [&] { return begin_directory(checkpoint_path(place.output_dir, place.step)); });
}

std::vector<TensorFile> write_tensors(const fs::path& temporary, const CheckpointPlace& place,
                                      const RankTensors& tensors, const CheckpointContents& contents) {
  std::vector<TensorFile> files;
  // The directory goes with them where nobody else writes there: others would be told that it is gone.
  const FileNumber &weights = tensors.weights_file, &moments = tensors.moments_file;
  const std::vector<fs::path> own = {temporary / tensor_file_name(kWeights, weights.number, weights.count),
                                     temporary / tensor_file_name(kOptimizerFiles, moments.number, moments.count)};
  return saving(place, moments.count == 1 ? std::vector{temporary} : own, [&] {
    if (!tensors.weights.empty() && contents.lora.enabled())
      write_peft_adapter(temporary, contents.lora, contents.model, contents.copy_from.string(), tensors.weights);
    else if (!tensors.weights.empty())
      files.push_back(write_file(temporary, kWeights, tensors.weights_file, tensors.weights));
    if (!tensors.moments.empty())
      files.push_back(write_file(temporary, kOptimizerFiles, tensors.moments_file, tensors.moments));
    sync_directory(temporary);
    return files;
  });
}

fs::path finish_checkpoint(const fs::path& temporary, const CheckpointPlace& place,
                           const std::vector<TensorFile>& files, const CheckpointContents& contents) {
  const fs::path directory = checkpoint_path(place.output_dir, place.step);
  saving(place, {temporary}, [&] {
    if (!contents.lora.enabled()) {
      HfWriteOptions options;
      options.copy_from = contents.copy_from;
      write_hf_companions(temporary, contents.model, options);
    }
    bool several = write_index(temporary, kWeights, files);
    several |= write_index(temporary, kOptimizerFiles, files);
    write_selection_file(temporary / kSelectionFile, contents.state.selection, contents.model);
    write_state(temporary / "state.json", contents.state);
    write_new_file(temporary / "run.yaml", contents.run_config);
    std::map<std::string, WrittenFile> written;
    for (const TensorFile& file : files) written[file.name] = file.written;
    write_manifest(temporary, written, several ? 2 : 1);
    finish_directory(temporary, directory);
  });
  return directory;
}

}  // namespace sb
