#include "run/checkpoint/checkpoint.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "core/files/durable_file.h"
#include "core/files/regular_file.h"
#include "core/log.h"
#include "core/memory_plan.h"
#include "core/utf8.h"
#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "run/checkpoint/optimizer_file.h"
#include "run/checkpoint/selection_file.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kSaving = ".saving-";
constexpr std::string_view kRemoving = ".removing-";

uint32_t piece_checksum(const fs::path& file, int64_t begin, int64_t end) {
  RegularFile in(file);
  in.seek(begin);
  std::vector<char> buffer(1 << 20);
  uint32_t crc = 0;
  while (begin < end) {
    const size_t got = in.read(buffer.data(), static_cast<size_t>(std::min<int64_t>(end - begin, std::ssize(buffer))));
    SB_USER_CHECK(got > 0, "{}: was truncated while it was being read", file.string());
    crc = crc32c(crc, buffer.data(), got);
    begin += static_cast<int64_t>(got);
  }
  return crc;
}

std::string checksum_text(uint32_t checksum) {
  return fmt::format("{:08x}", checksum);
}

// Large files in pieces at the same time: one reader does not keep a disk busy.
std::string file_checksum(const fs::path& file) {
  constexpr int64_t kLeastPiece = int64_t{64} << 20, kMostPieces = 8;
  const int64_t size = RegularFile(file).size();
  const int64_t pieces = std::clamp<int64_t>(size / kLeastPiece, 1, kMostPieces);
  const auto border = [&](int64_t piece) { return size / pieces * piece + std::min(piece, size % pieces); };
  std::vector<std::future<uint32_t>> others;
  for (int64_t p = 1; p < pieces; ++p)
    others.push_back(std::async(std::launch::async, piece_checksum, file, border(p), border(p + 1)));
  uint32_t crc = piece_checksum(file, 0, border(1));
  for (int64_t p = 1; p < pieces; ++p)
    crc =
        crc32c_joined(crc, others[static_cast<size_t>(p - 1)].get(), static_cast<uint64_t>(border(p + 1) - border(p)));
  return checksum_text(crc);
}

nlohmann::json read_json(const fs::path& file) {
  nlohmann::json object = nlohmann::json::parse(read_regular_file(file), nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(object.is_object(), "{}: not a JSON object", file.string());
  return object;
}

// `known`: the checksums of files as they were written. What is small is read again.
void write_manifest(const fs::path& directory, const std::map<std::string, uint32_t>& known) {
  nlohmann::ordered_json files;
  std::vector<fs::path> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  for (const fs::path& name : names) {
    const auto written = known.find(name.string());
    files[name.string()] = {
        {"bytes", fs::file_size(directory / name)},
        {"crc32c", written != known.end() ? checksum_text(written->second) : file_checksum(directory / name)}};
  }
  const nlohmann::ordered_json manifest = {{"format", kFormat}, {"files", files}};
  write_new_file(directory / "manifest.json", manifest.dump(1) + "\n");
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

// Sizes against the manifest, and the checksums too when asked (which reads every byte). What cannot be read is not
// known to be damaged, and thrown as UnreadableFile.
std::optional<std::string> compare_with_manifest(const fs::path& checkpoint, bool checksums) {
  try {
    const nlohmann::json manifest = read_json(checkpoint / "manifest.json");
    const nlohmann::json& format = manifest.at("format");
    if (format != kFormat)  // written out only when that cannot walk a deep nesting on the stack
      return fmt::format("manifest.json has format {}, this version reads {}",
                         format.is_structured() ? format.type_name() : format.dump(), kFormat);
    for (const auto& [name, entry] : manifest.at("files").items()) {
      const fs::path file = checkpoint / name;
      if (std::error_code ignored; !fs::exists(file, ignored) && !ignored) return fmt::format("{} is missing", name);
      const auto bytes = static_cast<uint64_t>(RegularFile(file).size());
      const uint64_t expected = entry.at("bytes");
      if (bytes != expected) return fmt::format("{} has {} bytes instead of {}", name, bytes, expected);
      if (checksums && entry.at("crc32c") != file_checksum(file)) return fmt::format("{} has a wrong checksum", name);
    }
  } catch (const nlohmann::json::exception& error) {
    return fmt::format("manifest.json is damaged ({})", printable(error.what(), 200));
  } catch (const UnreadableFile& error) {
    // Removed, or something else has its name: damage. Anything else may be gone tomorrow.
    if (error.reason() == ENOENT || error.reason() == ENOTDIR || error.reason() == 0) return error.what();
    throw;
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

// Whether its sizes are those of the manifest, as far as that can be seen.
bool looks_complete(const fs::path& checkpoint) {
  try {
    return !compare_with_manifest(checkpoint, /*checksums=*/false);
  } catch (const UnreadableFile&) {
    return false;
  }
}

// A name of this kind beside the directory that nothing has: what an earlier process left goes, unless it belongs to
// somebody else.
fs::path free_name(const fs::path& directory, std::string_view kind) {
  const fs::path name = directory.parent_path() / (std::string(kind) + directory.filename().string());
  fs::path candidate = name;
  for (int number = 2;; ++number) {
    std::error_code failed;
    fs::remove_all(candidate, failed);
    if (!failed || number > 100) return candidate;  // whoever uses it says what is wrong
    candidate = name.string() + fmt::format(".{}", number);
  }
}

// Renamed first: a half-deleted directory must not look like a checkpoint.
void remove_directory(const fs::path& directory) {
  const fs::path doomed = free_name(directory, kRemoving);
  fs::rename(directory, doomed);
  fs::remove_all(doomed);
}

// Gives a new directory its name. One that has it stays until the new one is there, and is gone afterwards.
void put_in_place(const fs::path& fresh, const fs::path& directory) {
  if (!fs::exists(directory)) return fs::rename(fresh, directory);
  fs::path old = fresh;
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, directory.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system that cannot exchange two names.
    old = free_name(directory, kRemoving);
    fs::rename(directory, old);
    try {
      fs::rename(fresh, directory);
    } catch (const fs::filesystem_error&) {
      fs::rename(old, directory);
      throw;
    }
  }
  std::error_code failed;
  fs::remove_all(old, failed);
  if (failed)
    log::warning("{} is left over from an earlier save and cannot be removed: {}", old.string(), failed.message());
}

// The checksums of what is large, as it was written.
std::map<std::string, uint32_t> write_weights(const fs::path& directory, const CheckpointContents& contents) {
  std::map<std::string, uint32_t> checksums;
  if (contents.lora.enabled()) {
    write_peft_adapter(directory, contents.lora, contents.model, contents.copy_from.string(), contents.weights);
    return checksums;
  }
  HfWriteOptions options;
  options.dtype = DType::f32;
  options.copy_from = contents.copy_from;
  options.checksums = &checksums;
  write_hf_model(directory, contents.model, contents.weights, options);
  return checksums;
}

std::string previous_checkpoint_note(const fs::path& output_dir) {
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const fs::path path = checkpoint_path(output_dir, *step);
    if (looks_complete(path)) return fmt::format("{} is intact, and the same command resumes from it", path.string());
  }
  return "there is no earlier checkpoint";
}

}  // namespace

fs::path checkpoint_path(const fs::path& output_dir, int64_t step) {
  return output_dir / fmt::format("{}{}", kPrefix, step);
}

std::vector<int64_t> checkpoint_steps(const fs::path& output_dir) {
  std::vector<int64_t> steps;
  if (!fs::exists(output_dir)) return steps;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = 0;
    const char *begin = name.data() + kPrefix.size(), *end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(begin, end, step);
    if (error == std::errc() && rest == end && begin != end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void write_directory_atomically(const fs::path& directory, const std::function<void(const fs::path&)>& fill) {
  const fs::path parent = directory.parent_path();
  const fs::path temporary = free_name(directory, kSaving);
  try {
    fs::create_directory(temporary);
    fill(temporary);
    for (const auto& entry : fs::recursive_directory_iterator(temporary))
      entry.is_directory() ? sync_directory(entry.path()) : sync_file(entry.path());
    sync_directory(temporary);
    put_in_place(temporary, directory);
    sync_directory(parent);
  } catch (const fs::filesystem_error& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw UserError("{}", error.what());
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
}

fs::path save_checkpoint(const fs::path& output_dir, const CheckpointContents& contents) {
  const fs::path directory = checkpoint_path(output_dir, contents.state.step);
  try {
    write_directory_atomically(directory, [&](const fs::path& temporary) {
      std::map<std::string, uint32_t> checksums = write_weights(temporary, contents);
      checksums["optimizer.safetensors"] =
          write_safetensors(temporary / "optimizer.safetensors", contents.moments, DType::f32);
      write_selection_file(temporary / kSelectionFile, contents.state.selection, contents.model);
      write_state(temporary / "state.json", contents.state);
      write_new_file(temporary / "run.yaml", contents.run_config);
      write_manifest(temporary, checksums);
    });
  } catch (const UserError& error) {
    std::error_code ignored;
    const fs::space_info space = fs::space(output_dir, ignored);
    int64_t elements = 0;
    for (const SafetensorsTensor& tensor : contents.weights) elements += tensor.elements();
    throw UserError(
        "the checkpoint of step {} could not be saved: {}. {} are free there, and a checkpoint takes {}. Free some "
        "space; {}.",
        contents.state.step, error.what(), format_bytes(static_cast<int64_t>(space.available)),
        format_bytes(elements * 12), previous_checkpoint_note(output_dir));
  }
  return directory;
}

void remove_old_checkpoints(const fs::path& output_dir, int64_t newest, int64_t keep, int64_t last_good) {
  if (keep <= 0) return;
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  int64_t complete = 0;
  bool good_one_kept = false;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (*step > newest) continue;
    const fs::path path = checkpoint_path(output_dir, *step);
    if (!looks_complete(path)) continue;
    const bool newest_good = *step <= last_good && !good_one_kept;
    good_one_kept |= newest_good;
    if (++complete <= keep || newest_good) continue;
    try {
      remove_directory(path);
    } catch (const fs::filesystem_error& error) {
      log::warning("{} could not be removed: {}", path.string(), error.what());  // no reason to end a run
    }
  }
}

std::optional<std::string> find_damage(const fs::path& checkpoint) {
  // Silence would look like a program that hangs.
  constexpr uintmax_t kTakesAWhile = uintmax_t{1} << 30;
  uintmax_t bytes = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(checkpoint, ignored))
    if (entry.is_regular_file(ignored)) bytes += entry.file_size(ignored);
  if (bytes >= kTakesAWhile)
    log::info("verifying the checksums of {} ({})", checkpoint.string(), format_bytes(static_cast<int64_t>(bytes)));
  return compare_with_manifest(checkpoint, /*checksums=*/true);
}

std::optional<fs::path> newest_intact_checkpoint(const fs::path& output_dir) {
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const fs::path path = checkpoint_path(output_dir, *step);
    std::optional<std::string> damage;
    try {
      damage = find_damage(path);
    } catch (const UnreadableFile& error) {
      throw UserError(
          "{}. It belongs to the newest checkpoint, which may be intact: make it readable and start again, or move {} "
          "away to resume from an older one",
          error.what(), path.string());
    }
    if (!damage) return path;
    log::warning("skipping {}, which is damaged: {}", path.string(), *damage);
  }
  SB_USER_CHECK(steps.empty(),
                "{}: all {} checkpoints are damaged. Restore one, or start over with another train.output_dir",
                output_dir.string(), steps.size());
  return std::nullopt;
}

TrainState read_train_state(const fs::path& checkpoint) {
  const fs::path file = checkpoint / "state.json";
  const nlohmann::json json = read_json(file);
  TrainState state;
  try {
    state.step = json.at("step");
    state.updates = json.at("updates");
    state.position = json.at("position");
    state.source_state = json.at("source_state");
    state.tokens = json.at("tokens");
    state.skipped = json.at("skipped");
    state.skipped_in_row = json.at("skipped_in_row");
    state.planner_state = json.value("planner_state", "");  // older checkpoints have none of these
    state.source = json.value("source", "");
    state.base = json.value("base", "");
  } catch (const nlohmann::json::exception& error) {
    throw UserError("{}: {}", file.string(), error.what());
  }
  return state;
}

TrainState load_checkpoint(const fs::path& checkpoint, ParameterSet& parameters, const ShardLayout& layout, int shard,
                           TensorView first_moment, TensorView second_moment) {
  read_hf_weights(checkpoint, parameters);
  return load_moments(checkpoint, parameters, layout, shard, first_moment, second_moment);
}

TrainState load_moments(const fs::path& checkpoint, const ParameterSet& parameters, const ShardLayout& layout,
                        int shard, TensorView first_moment, TensorView second_moment) {
  read_optimizer_file(checkpoint / "optimizer.safetensors", parameters, layout, shard, first_moment, second_moment);
  return read_train_state(checkpoint);
}

void remove_leftovers(const fs::path& output_dir) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kSaving) || name.starts_with(kRemoving)) leftovers.push_back(entry.path());
  }
  for (const fs::path& path : leftovers) {
    std::error_code failed;
    fs::remove_all(path, failed);
    if (failed)
      log::warning("{} is left over from an earlier save and cannot be removed: {}", path.string(), failed.message());
  }
}

}  // namespace sb
