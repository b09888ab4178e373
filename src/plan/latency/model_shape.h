#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

// The sizes of a decoder that its running time depends on.
struct ModelShape {
  std::string name;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocabulary = 0;
  bool tied = false;

  // Parameters of one layer (without biases and norms) and of the embedding.
  int64_t layer_parameters() const {
    return hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden + 3 * hidden * intermediate;
  }
  // Of adapters of this rank on all products of a layer: inputs plus outputs of each.
  int64_t adapter_parameters(int64_t rank) const {
    const int64_t query = heads * head_dim, key = kv_heads * head_dim;
    return rank * (2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + intermediate));
  }
  int64_t embedding_parameters() const { return hidden * vocabulary; }

  // What one of `tp` tensor-parallel ranks computes with: its heads, its part of the MLP and of the vocabulary. Where
  // there are fewer key/value heads than ranks, several ranks hold the same one.
  ModelShape of_rank(int64_t tp) const;
};
// What keeps `tp` ranks from sharing every layer of this model; empty: nothing does.
std::string tensor_parallel_problem(const ModelShape& shape, int64_t tp);
// The same with sparse attention, which needs all query heads of a key/value head in one place.
std::string sparse_tensor_parallel_problem(const ModelShape& shape, int64_t tp);

// Equal in every size that latency depends on; names do not count.
bool same_sizes(const ModelShape& a, const ModelShape& b);
// "24 layers, hidden 896, 14/2 heads of 64, intermediate 4864, vocabulary 151936"
std::string describe(const ModelShape& shape);
// Sizes must be positive and fit each other; UserError names `where`.
void check_model_shape(const ModelShape& shape, const std::string& where);

std::vector<std::string> named_model_shapes();
// One of the names above, or the path of a config.json or of the directory that holds it.
ModelShape find_model_shape(const std::string& name_or_path);

}  // namespace sb
