#include "data/token_file.h"

#include <glob.h>

#include <filesystem>

#include "core/errors.h"
#include "data/label_mask.h"

namespace sb {

TokenFile::TokenFile() = default;
TokenFile::~TokenFile() = default;

int64_t token_bytes(TokenType type) {
  return type == TokenType::u16 ? 2 : 4;
}

int64_t TokenFile::total_tokens() const {
  int64_t total = 0;
  for (int64_t d = 0; d < documents(); ++d) total += length(d);
  return total;
}

std::unique_ptr<TokenFile> open_token_file(const std::string& path) {
  const auto ends_with = [&](const char* suffix) { return path.size() > 4 && path.substr(path.size() - 4) == suffix; };
  const std::string prefix = ends_with(".idx") || ends_with(".bin") ? path.substr(0, path.size() - 4) : path;
  if (std::filesystem::exists(prefix + ".idx")) return open_megatron_file(prefix);
  for (const std::string& file : {path, prefix + ".bin"})
    if (std::filesystem::is_regular_file(file) && looks_like_llmc(file)) return open_llmc_file(file);
  throw UserError("{}: no token file: there is neither {}.idx (Megatron) nor a .bin file with an llm.c header{}", path,
                  prefix,
                  std::filesystem::exists(prefix + ".partial")
                      ? "; " + prefix + ".partial is an unfinished run of `data tokenize`, which can be started again"
                      : "");
}

std::vector<std::string> expand_token_paths(const std::vector<std::string>& paths) {
  std::vector<std::string> expanded;
  for (const std::string& path : paths) {
    if (path.find_first_of("*?[") == std::string::npos || std::filesystem::exists(path)) {
      expanded.push_back(path);
      continue;
    }
    glob_t found{};
    const int result = ::glob(path.c_str(), 0, nullptr, &found);
    for (size_t i = 0; result == 0 && i < found.gl_pathc; ++i) {
      // One entry a Megatron pair: the index stands for it.
      const std::string match = found.gl_pathv[i];
      const std::filesystem::path as_path(match);
      const bool pair = std::filesystem::exists(std::filesystem::path(match).replace_extension(".idx"));
      if (as_path.extension() == ".idx" || (as_path.extension() == ".bin" && !pair)) expanded.push_back(match);
    }
    ::globfree(&found);
    SB_USER_CHECK(result == 0, "{}: nothing matches this pattern", path);
  }
  return expanded;
}

}  // namespace sb
