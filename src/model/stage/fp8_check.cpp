// Apart from the stage itself: who reads a run's configuration alone needs no products, nor the libraries behind them.
#include "core/errors.h"
#include "model/stage/stage.h"
#include "ops/fp8/fp8.h"

namespace sb {

void check_fp8(const ModelConfig& config, const LoraConfig& lora) {
  SB_USER_CHECK(!lora.enabled(), "train.precision: fp8 trains whole models; with lora set train.precision: auto");
  const int64_t query = int64_t{config.heads} * config.head_dim, key = int64_t{config.kv_heads} * config.head_dim;
  for (const int64_t width : {int64_t{config.hidden_size}, query, key, int64_t{config.intermediate_size}}) {
    SB_USER_CHECK(width % kFp8Multiple == 0,
                  "train.precision: fp8 wants products of multiples of {}, and this model has one of {}; set "
                  "train.precision: auto",
                  kFp8Multiple, width);
  }
}

}  // namespace sb
