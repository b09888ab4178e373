#include "data/files/token_writer.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "core/errors.h"
#include "data/files/label_mask.h"
#include "python/bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void add(TokenWriter& writer, const Ids& tokens, const Flags& targets) {
  SB_USER_CHECK(targets.size() == 0 || targets.size() == tokens.size(), "{} targets for {} tokens", targets.size(),
                tokens.size());
  writer.add({tokens.data(), tokens.size()}, {targets.data(), targets.size()});
}

// Tokens and targets of a document.
std::pair<std::vector<int32_t>, std::vector<uint8_t>> read_document(const TokenFile& file, int64_t document) {
  SB_USER_CHECK(document >= 0 && document < file.documents(), "{}: has documents 0 to {}, not {}", file.name(),
                file.documents() - 1, document);
  std::pair<std::vector<int32_t>, std::vector<uint8_t>> read;
  read.first.resize(static_cast<size_t>(file.length(document)));
  file.read(document, 0, file.length(document), read.first.data());
  for (int64_t t = 0; t < file.length(document); ++t)
    read.second.push_back(t > 0 && (file.mask() == nullptr || file.mask()->is_target(document, t)));
  return read;
}

}  // namespace

void bind_token_files(nb::module_& module) {
  nb::class_<TokenWriter>(module, "TokenWriter")
      .def(
          "__init__",
          [](TokenWriter* self, const std::string& prefix, int64_t vocab_size, bool overwrite) {
            SB_USER_CHECK(vocab_size > 0, "a vocabulary of {} tokens", vocab_size);
            new (self) TokenWriter(prefix, {.type = vocab_size <= 65536 ? TokenType::u16 : TokenType::i32,
                                            .resume = false,
                                            .overwrite = overwrite,
                                            .origin = {}});
          },
          "prefix"_a, "vocab_size"_a, "overwrite"_a)
      .def("add", add, "tokens"_a, "targets"_a)
      .def("finish", &TokenWriter::finish)
      .def_prop_ro("documents", &TokenWriter::documents)
      .def_prop_ro("tokens", &TokenWriter::tokens);
  nb::class_<TokenFile>(module, "TokenFile", "Documents of tokens in a file on disk.")
      .def("__len__", &TokenFile::documents)
      .def(
          "length",
          [](const TokenFile& file, int64_t document) {
            SB_USER_CHECK(document >= 0 && document < file.documents(), "{}: has no document {}", file.name(),
                          document);
            return file.length(document);
          },
          "document"_a)
      .def(
          "read",
          [](const TokenFile& file, int64_t document) {
            auto [tokens, targets] = read_document(file, document);
            const size_t count = tokens.size();
            return nb::make_tuple(nb::cast(numpy_array(std::move(tokens), {count}), nb::rv_policy::move),
                                  nb::cast(numpy_array(std::move(targets), {count}), nb::rv_policy::move));
          },
          "document"_a, "Tokens (int32) of a document, and which of them are targets (uint8).");
  module.def(
      "open_token_file", [](const std::string& path) { return open_token_file(path); }, "path"_a);
}

}  // namespace sb::python
