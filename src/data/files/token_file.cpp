#include "data/files/token_file.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>

#include "core/errors.h"
#include "data/files/label_mask.h"

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
  if (std::filesystem::is_directory(path) && std::filesystem::exists(std::filesystem::path(path) / "index.json"))
    return open_mds_folder(path);
  std::string hint;
  if (std::filesystem::exists(prefix + ".partial"))
    hint = "; " + prefix + ".partial is an unfinished run of `data tokenize`; start that again to finish it";
  else if (std::filesystem::is_directory(path))
    hint = "; it is a directory: \"" + (std::filesystem::path(path) / "*").string() +
           "\" names the token files in it, and `sparsebalance data tokenize` makes some from text";
  else if (std::filesystem::exists(path))
    hint = "; `sparsebalance data tokenize` makes token files from text";
  throw UserError(
      "{}: is not a token file: there is neither {}.idx (Megatron), nor a .bin file with an llm.c header, nor a "
      "directory with the index.json of MDS shards{}",
      path, prefix, hint);
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
    const size_t matches = result == 0 ? found.gl_pathc : 0;
    std::vector<std::string> files;
    for (size_t i = 0; i < matches; ++i) {
      // One entry a Megatron pair, whichever of its files match: the index stands for both.
      std::filesystem::path match = found.gl_pathv[i];
      if (match.extension() == ".bin") {
        const std::filesystem::path index = std::filesystem::path(match).replace_extension(".idx");
        if (std::filesystem::exists(index)) match = index;
      } else if (match.extension() != ".idx") {
        continue;
      }
      if (std::find(files.begin(), files.end(), match.string()) == files.end()) files.push_back(match.string());
    }
    ::globfree(&found);
    SB_USER_CHECK(result == 0 || result == GLOB_NOMATCH, "{}: the directories of this pattern cannot be read", path);
    SB_USER_CHECK(matches > 0, "{}: nothing matches this pattern", path);
    SB_USER_CHECK(!files.empty(), "{}: {} files match this pattern, but none of them is a token file (.idx or .bin)",
                  path, matches);
    expanded.insert(expanded.end(), files.begin(), files.end());
  }
  return expanded;
}

}  // namespace sb
