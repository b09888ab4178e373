#include <cstddef>
#include <cstdint>

#include "core/errors.h"
#include "model/model_config.h"

// Any text is either refused with a UserError or gives a model whose written form reads back as the same model.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sb::ModelConfig config;
  try {
    config = sb::parse_model_config({reinterpret_cast<const char*>(data), size}, "fuzz.json");
  } catch (const sb::UserError&) {
    return 0;
  }
  const sb::ModelConfig again = sb::parse_model_config(sb::write_model_config(config, "float32"), "written.json");
  SB_CHECK(again.rope == config.rope && again.hidden_size == config.hidden_size && again.head_dim == config.head_dim &&
               again.eos_token_ids == config.eos_token_ids && again.rms_norm_eps == config.rms_norm_eps,
           "the written config reads back differently:\n{}", sb::write_model_config(config, "float32"));
  return 0;
}
