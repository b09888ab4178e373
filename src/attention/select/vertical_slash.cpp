#include "attention/select/vertical_slash.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/select/by_mass.h"
#include "core/errors.h"

namespace sb {
namespace {

// Indices of the fewest entries whose sum reaches `share` of the total, `already` counting as reached; at most `cap`.
std::vector<int32_t> fewest_reaching(std::span<const double> mass, double share, int64_t cap, double already) {
  std::vector<int32_t> order(mass.size());
  std::iota(order.begin(), order.end(), 0);
  const double total = std::accumulate(mass.begin(), mass.end(), already);
  const int64_t most = std::min<int64_t>(cap, static_cast<int64_t>(mass.size()));
  std::partial_sort(order.begin(), order.begin() + most, order.end(),
                    [&](int32_t a, int32_t b) { return selected_before(mass[a], a, mass[b], b); });
  double held = already;
  int64_t taken = 0;
  // A share of 1 means everything: rounding in the sums must not leave entries out.
  while (taken < most && (share >= 1.0 || held < share * total)) held += mass[order[taken++]];
  order.resize(taken);
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

VerticalSlash find_vertical_slash(const float* probabilities, int rows, int64_t tokens, int block,
                                  const VerticalSlashLimits& limits) {
  SB_CHECK(rows >= 1 && rows <= tokens, "{} rows of {} tokens", rows, tokens);
  const int64_t blocks = (tokens + block - 1) / block;
  std::vector<double> columns(tokens, 0.0), distances(blocks, 0.0);
  for (int r = 0; r < rows; ++r) {
    const float* row = probabilities + int64_t{r} * tokens;
    const int64_t query = tokens - rows + r, query_block = query / block;
    for (int64_t m = 0; m <= query; ++m) {
      columns[m] += row[m];
      distances[query_block - m / block] += row[m];
    }
  }
  return select_vertical_slash(columns, distances, limits);
}

VerticalSlash select_vertical_slash(std::span<const double> columns, std::span<const double> distances,
                                    const VerticalSlashLimits& limits) {
  VerticalSlash found;
  found.verticals = fewest_reaching(columns, limits.vertical_coverage, limits.vertical_cap, 0.0);
  const double diagonal = distances[0];
  found.slashes = fewest_reaching(distances.subspan(1), limits.slash_coverage,
                                  std::max<int64_t>(0, limits.slash_cap - 1), diagonal);
  for (int32_t& slash : found.slashes) ++slash;
  found.slashes.insert(found.slashes.begin(), 0);
  return found;
}

VerticalSlashLimits vertical_slash_limits(const SelectionConfig& config, int64_t budget) {
  const double share = static_cast<double>(budget) / static_cast<double>(config.budget);
  return {config.vertical_coverage, config.slash_coverage,
          std::llround(static_cast<double>(config.vertical_cap) * share),
          std::max<int64_t>(1, std::llround(static_cast<double>(config.slash_cap) * share))};
}

void vertical_slash_row(const SequenceTiles& tiles, const VerticalSlash& found, int64_t tile,
                        std::vector<uint8_t>& listed, std::vector<IndexEntry>& row, std::vector<int32_t>& columns) {
  listed.resize(tiles.blocks());
  row.clear();
  columns.clear();
  const int64_t competing = tiles.competing(tile), visible = tiles.visible(tile);
  for (int64_t j = 0; j < visible; ++j) listed[j] = tiles.forced(tile, j);
  for (int64_t own = competing; own < visible; ++own) {
    for (const int32_t distance : found.slashes) {
      if (distance <= own) listed[own - distance] = 1;
    }
  }
  for (int64_t j = 0; j < visible; ++j) {
    if (listed[j]) row.push_back({static_cast<uint16_t>(j), 0});
  }
  for (const int32_t column : found.verticals) {
    const int64_t block = column / tiles.block;
    if (block < competing && !listed[block]) columns.push_back(column);
  }
}

}  // namespace sb
