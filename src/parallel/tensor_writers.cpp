#include "parallel/tensor_writers.h"

#include <algorithm>
#include <numeric>

namespace sb {
namespace {

int64_t elements_of(const TensorWriters::Item& item) {
  return item.tensor->parts[0].flat.elements();
}

// Every item to one of so many ranks: the largest first, each to the rank that has the least so far. Of several that
// have as little it is the last: the first rank of the world writes the small files, too.
std::vector<size_t> spread(const std::vector<TensorWriters::Item>& items, std::vector<int64_t> loads) {
  std::vector<size_t> order(items.size()), chosen(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(), [&](size_t i) { return elements_of(items[i]); });
  for (const size_t i : order) {
    const auto least = std::min_element(loads.rbegin(), loads.rend());
    *least += elements_of(items[i]);
    chosen[i] = static_cast<size_t>(loads.rend() - least) - 1;
  }
  return chosen;
}

}  // namespace

TensorWriters::TensorWriters(const ModelLayout& layout, const GridShape& grid, bool weights_on_first_rank)
    : items_(static_cast<size_t>(grid.ranks())) {
  std::vector<std::vector<size_t>> ranks(static_cast<size_t>(grid.pp));
  for (int rank = 0; rank < grid.ranks(); ++rank)
    ranks[static_cast<size_t>(grid_place(grid, rank).stage)].push_back(static_cast<size_t>(rank));
  if (weights_on_first_rank)
    for (const ModelLayout::Tensor& tensor : layout.tensors()) items_[0].push_back({&tensor, Kind::weight});
  for (int stage = 0; stage < grid.pp; ++stage) {
    const std::vector<size_t>& own = ranks[static_cast<size_t>(stage)];
    std::vector<Item> items;
    for (const Kind kind : {Kind::weight, Kind::first_moment, Kind::second_moment})
      for (const ModelLayout::Tensor& tensor : layout.tensors())
        if (tensor.stage == stage && !(kind == Kind::weight && weights_on_first_rank)) items.push_back({&tensor, kind});
    std::vector<int64_t> loads;
    for (const size_t rank : own) loads.push_back(elements(static_cast<int>(rank)));
    const std::vector<size_t> chosen = spread(items, loads);
    for (size_t i = 0; i < items.size(); ++i) items_[own[chosen[i]]].push_back(items[i]);
  }
}

int64_t TensorWriters::elements(int rank) const {
  int64_t sum = 0;
  for (const Item& item : of(rank)) sum += elements_of(item);
  return sum;
}

size_t TensorWriters::rounds() const {
  return std::ranges::max_element(items_, {}, &std::vector<Item>::size)->size();
}

TensorWriters::File TensorWriters::file(int rank, bool of_weights) const {
  File file;
  for (size_t r = 0; r < items_.size(); ++r) {
    if (std::ranges::none_of(items_[r], [&](const Item& item) { return (item.kind == Kind::weight) == of_weights; }))
      continue;
    ++file.count;
    if (static_cast<int>(r) == rank) file.number = file.count;
  }
  return file;
}

}  // namespace sb
