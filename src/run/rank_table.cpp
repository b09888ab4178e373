#include "run/rank_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "comm/host_name.h"
#include "device/blas_kernels.h"
#include "device/cuda.h"
#include "parallel/grid.h"
#include "run/machine.h"

namespace sb {
namespace {

using Row = std::array<std::string, 5>;

std::string packed(const RankMachine& machine) {
  return fmt::format("{}\n{}\n{}\n{}", machine.host, machine.device, machine.kernels, machine.threads);
}

RankMachine unpacked(const std::string& text) {
  std::array<std::string, 4> fields;
  size_t begin = 0;
  for (std::string& field : fields) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    field = text.substr(begin, end - begin);
    begin = std::min(end + 1, text.size());
  }
  return {fields[0], fields[1], fields[2], std::atoi(fields[3].c_str())};
}

}  // namespace

RankMachine own_machine(DeviceKind device, int threads) {
  const bool gpu = device == DeviceKind::cuda;
  return {host_name(), gpu ? cuda::device_info().name : processor_name(), gpu ? "CUDA" : describe(blas_kernels()),
          threads};
}

std::vector<RankMachine> gather_machines(Communicator& world, const RankMachine& own) {
  std::vector<RankMachine> machines;
  for (const std::string& text : gather_texts(world, packed(own), 0)) machines.push_back(unpacked(text));
  return machines;
}

std::string rank_table(const std::vector<RankMachine>& ranks) {
  std::vector<Row> rows = {{"rank", "host", "device", "kernels", "threads"}};
  for (size_t first = 0, next = 0; first < ranks.size(); first = next) {
    while (next < ranks.size() && ranks[next] == ranks[first]) ++next;
    const RankMachine& machine = ranks[first];
    rows.push_back({next - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, next - 1), machine.host,
                    machine.device, machine.kernels, fmt::format("{}", machine.threads)});
  }
  std::array<size_t, 5> widths = {};
  for (const Row& row : rows)
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], row[column].size());
  std::string text;
  for (const Row& row : rows) {
    std::string line = " ";
    for (size_t column = 0; column < row.size(); ++column)
      line += fmt::format(" {:<{}}", row[column], widths[column] + 1);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string rank_differences(const std::vector<RankMachine>& ranks) {
  std::string text;
  for (size_t rank = 1; rank < ranks.size() && text.empty(); ++rank) {
    const RankMachine &one = ranks[rank], &first = ranks[0];
    const auto compare = [&](const std::string& own, const std::string& firsts, const char* what) {
      if (own == firsts || !text.empty()) return;
      text = fmt::format("rank {} on {} has another {} ({}) than rank 0 on {} ({})", rank, one.host, what, own,
                         first.host, firsts);
    };
    compare(one.device, first.device, "device");
    compare(one.kernels, first.kernels, "set of kernels");
    compare(fmt::format("{}", one.threads), fmt::format("{}", first.threads), "number of threads");
  }
  return text;
}

}  // namespace sb
