// What a layer takes: its own allocations, counted before there are any.
#include <algorithm>

#include "model/decoder_layer.h"
#include "model/layer_widths.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"

namespace sb {

namespace {

// Bytes that tensors take in an arena.
struct TensorBytes {
  int64_t tokens;
  DType dtype;

  // [tokens, columns] tensors of activations, or of fp32 statistics, summed.
  int64_t activations(std::initializer_list<int64_t> columns) const { return bytes(dtype, columns); }
  int64_t statistics(std::initializer_list<int64_t> columns) const { return bytes(DType::f32, columns); }

 private:
  int64_t bytes(DType type, std::initializer_list<int64_t> columns) const {
    int64_t sum = 0;
    for (const int64_t width : columns) sum += Arena::rounded(tokens * width * dtype_bytes(type));
    return sum;
  }
};

// bytes(rows at once, columns of the input, of the output) of the product that has the most.
template <typename Bytes>
int64_t most_of_products(const ModelConfig& config, int64_t tokens, int64_t chunk, const Bytes& bytes) {
  const LayerWidths width(config);
  const int64_t piece = std::min(tokens, chunk);
  return std::max({bytes(piece, width.hidden, width.qkv), bytes(tokens, width.query, width.hidden),
                   bytes(piece, width.hidden, 2 * width.intermediate), bytes(piece, width.intermediate, width.hidden)});
}

}  // namespace

int64_t DecoderLayer::saved_bytes(const ModelConfig& config, DType dtype, int64_t tokens, int64_t rows,
                                  Recompute recompute) {
  const LayerWidths width(config);
  const TensorBytes of{tokens, dtype}, own{rows, dtype};
  if (recompute == Recompute::layer) return 0;
  int64_t bytes = of.activations({width.query}) + of.statistics({width.heads});
  if (recompute == Recompute::attention) return bytes;
  bytes += config.qk_norm ? of.activations({width.qkv}) : of.activations({width.query, width.key, width.key});
  return bytes + of.activations({2 * width.intermediate}) +
         own.activations({width.hidden, width.hidden, width.hidden}) + own.statistics({1, 1});
}

int64_t DecoderLayer::forward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens,
                                              const TokenShares& shares) {
  const LayerWidths width(config);
  const TensorBytes of{tokens, dtype}, own{shares.most(tokens), dtype}, piece{shares.largest_piece(tokens), dtype},
      all{shares.padded_piece(tokens), dtype}, own_piece{all.tokens / shares.share().ranks, dtype};
  // Where ranks share products, rows and sums of two pieces are on their way or in use at once.
  const int64_t rooms = shares.rooms(tokens);
  const int64_t norm = std::max<int64_t>(1, rooms) * (all.activations({width.hidden}) + own_piece.statistics({1}));
  const int64_t sums = rooms * all.activations({width.hidden});
  int64_t operands = of.activations({width.query, width.key, width.key});
  if (config.qk_norm) operands += of.statistics({width.heads, width.kv_heads});
  const int64_t projection = norm + piece.activations({width.qkv}),
                results = of.activations({width.query}) + of.statistics({width.heads}) + sums;
  const int64_t mlp = norm + piece.activations({2 * width.intermediate, width.intermediate}) + sums;
  return own.activations({width.hidden}) + std::max(operands + std::max(projection, results), mlp);
}

int64_t DecoderLayer::backward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens,
                                               const TokenShares& shares, Recompute recompute, bool split) {
  const LayerWidths width(config);
  const TensorBytes of{tokens, dtype}, own{shares.most(tokens), dtype}, piece{shares.largest_piece(tokens), dtype},
      all{shares.padded_piece(tokens), dtype}, own_piece{all.tokens / shares.share().ranks, dtype};
  const bool none = recompute == Recompute::none;
  // Where ranks share products, rows and gradients of two pieces are on their way or in use at once, and the sums of
  // one piece's gradients.
  const int64_t rooms = shares.rooms(tokens);
  const int64_t gathered = rooms * all.activations({width.hidden});
  const int64_t summed = rooms > 0 ? all.activations({width.hidden}) : 0;
  const int64_t norm =
      std::max<int64_t>(none ? 0 : 1, rooms) * (all.activations({width.hidden}) + own_piece.statistics({1}));
  const int64_t qkv = of.activations({width.qkv});
  const int64_t operands = of.activations({width.query, width.key, width.key});

  int64_t restored = 0, projection = 0;
  if (!none || config.qk_norm) restored += operands;
  if (config.qk_norm) restored += of.statistics({width.heads, width.kv_heads}) + (none ? 0 : qkv);
  if (!none) projection = restored + norm + (config.qk_norm ? 0 : piece.activations({width.qkv}));
  if (recompute == Recompute::layer) restored += of.activations({width.query}) + of.statistics({width.heads});
  const int64_t mlp = (none ? 0 : own.activations({width.hidden}) + piece.activations({2 * width.intermediate})) +
                      norm + gathered + piece.activations({width.intermediate}) + summed;
  const int64_t attention = qkv + std::max({operands, norm + summed, gathered});  // gradients
  // Where the weights' gradients wait, the input's cannot take the place of the norm's output.
  const int64_t beside = split ? piece.activations({width.hidden}) : 0;
  return std::max(projection, restored + std::max({mlp, attention, beside}));
}

int64_t DecoderLayer::waiting_bytes(const ModelConfig& config, DType dtype, int64_t tokens, const TokenShares& shares,
                                    Recompute recompute, bool fp8) {
  const LayerWidths width(config);
  const TensorBytes of{tokens, dtype};
  const bool none = recompute == Recompute::none;
  int64_t bytes = of.activations({width.hidden, width.qkv});
  if (recompute == Recompute::layer) bytes += of.activations({width.query});
  int64_t products = 0, codes = fp8 ? ::sb::fp8_bytes(tokens, width.hidden, Fp8Layout::both) : 0;
  shares.each_piece(tokens, [&](const TokenShares::Piece& rows) {
    const TensorBytes piece{rows.tokens(), dtype};
    bytes += piece.activations({width.hidden});
    if (!none) bytes += piece.activations({width.hidden, width.hidden});
    products += piece.activations({width.intermediate});
    if (!none) products += piece.activations({2 * width.intermediate});
    if (!fp8) return;
    for (const int64_t gradient : {width.hidden, 2 * width.intermediate, width.qkv})
      codes += ::sb::fp8_bytes(rows.tokens(), gradient, Fp8Layout::both);
    codes += ::sb::fp8_bytes(rows.tokens(), width.intermediate, Fp8Layout::by_column);
  });
  // Of layers that stay out of fp8 as much as of the others.
  return bytes + std::max(products, codes);
}

int64_t DecoderLayer::adapter_bytes(const ModelConfig& config, const LoraConfig& lora, DType dtype, int64_t tokens,
                                    int64_t chunk) {
  const LayerWidths width(config);
  const int64_t inputs = std::max({width.hidden, width.query, width.intermediate});
  return adapter_workspace_bytes(lora, std::min(tokens, chunk), inputs, dtype);
}

int64_t DecoderLayer::fp8_forward_bytes(const ModelConfig& config, int64_t tokens, int64_t chunk, bool with_weights) {
  // A weight beside the input of its product.
  const auto product = [&](int64_t count, int64_t in, int64_t out) {
    return fp8_bytes(count, in, Fp8Layout::by_row) + (with_weights ? fp8_bytes(out, in, Fp8Layout::by_row) : 0);
  };
  const int64_t largest = Arena::rounded(dtype_bytes(DType::f32));
  return largest + most_of_products(config, tokens, chunk, product);
}

int64_t DecoderLayer::fp8_backward_bytes(const ModelConfig& config, int64_t tokens, int64_t chunk, bool with_weights) {
  const LayerWidths width(config);
  const int64_t piece = std::min(tokens, chunk);
  // A weight or the input of its product beside the output's gradient.
  const auto product = [&](int64_t count, int64_t in, int64_t out) {
    return fp8_bytes(count, out, Fp8Layout::both) + std::max(fp8_bytes(count, in, Fp8Layout::by_column),
                                                             with_weights ? fp8_bytes(out, in, Fp8Layout::by_row) : 0);
  };
  const int64_t mlp = fp8_bytes(piece, width.hidden, Fp8Layout::both) +
                      fp8_bytes(piece, width.intermediate, Fp8Layout::by_column) +
                      product(piece, width.hidden, 2 * width.intermediate);
  return std::max({mlp, most_of_products(config, tokens, chunk, product),
                   fp8_forward_bytes(config, tokens, chunk, with_weights)});  // what runs again
}

int64_t DecoderLayer::kept_codes_bytes(const ModelConfig& config) {
  const LayerWidths width(config);
  const auto weight = [](int64_t in, int64_t out) { return fp8_bytes(out, in, Fp8Layout::both); };
  return weight(width.hidden, width.qkv) + weight(width.query, width.hidden) +
         weight(width.hidden, 2 * width.intermediate) + weight(width.intermediate, width.hidden);
}

int64_t DecoderLayer::scratch_bytes(const ModelConfig& config, DeviceKind device) {
  const LayerWidths width(config);
  int64_t bytes = rmsnorm_scratch_bytes(device, width.hidden);
  if (config.qkv_bias) bytes = std::max(bytes, linear_scratch_bytes(device, width.qkv));
  if (config.output_bias) bytes = std::max(bytes, linear_scratch_bytes(device, width.hidden));
  if (config.qk_norm) {
    bytes = std::max(bytes, qkv_rope_scratch_bytes(device, {config.heads, config.kv_heads, config.head_dim}));
  }
  return bytes;
}

}  // namespace sb
