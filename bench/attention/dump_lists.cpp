// Writes the block lists that a trained model selects, for benchmarks of the attention kernels:
//   dump_lists MODEL FILE [TOKENS [BUDGET [QUERY_BLOCK]]]
// MODEL is a Hugging Face directory; it reads one chunk-recall sequence and the lists of its last layer are kept,
// blocks of 128 keys, topk. With query blocks of 128 a block selects at once (lookahead), so that FlexAttention can
// follow; shorter ones select token by token. The file: int32 heads, query blocks, key blocks, query block, block; then
// a byte for every (head, query block, key block): the first token that sees it, 255: none.

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "core/errors.h"
#include "data/synthetic/synthetic.h"
#include "model/hf_checkpoint.h"
#include "model/stage/stage.h"
#include "train/packing.h"

namespace {

using namespace sb;

// Keeps the lists of the layer that ran last.
class KeepingAttention final : public ForwardingAttention {
 public:
  using ForwardingAttention::ForwardingAttention;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    kept = SparseAttention::index(state);
  }
  BlockIndex kept;
};

void run(const std::filesystem::path& model, const std::string& file, int64_t tokens, int64_t budget, int query_block) {
  const ModelConfig config = read_model_config(model / "config.json");
  SparseAttention::Options options;
  options.layers = config.layers;
  options.selection.budget = budget;
  options.selection.query_block = query_block;
  if (query_block == 128) options.selection.order = SelectionOrder::lookahead;
  SparseAttention sparse(options);
  KeepingAttention attention(sparse);
  ThreadPool pool(available_cores());
  StageOptions stage_options;
  stage_options.last_layer = config.layers;
  stage_options.max_micro_batch_tokens = stage_options.max_sequence_length = tokens;
  stage_options.training = false;
  Stage stage(config, stage_options, attention, pool.threads());
  read_hf_weights(model, stage.parameters());
  SyntheticOptions task;
  task.vocab_size = config.vocab_size;
  task.length = LengthDistribution::fixed(tokens);
  const TokenSequence sequence = make_synthetic_source(task, /*seed=*/4711)->read(0);
  const std::array selected{0};
  const std::array weight{1.0f};
  const MicroBatch batch = make_micro_batch({&sequence, 1}, selected, weight, config.vocab_size);
  Exec exec;
  exec.pool = &pool;
  stage.forward(exec, batch, 0, {});

  const BlockIndex& index = attention.kept;
  const BlockIndex::Sequence& all = index.sequences()[0];
  SB_USER_CHECK(!all.dense, "a budget of {} makes {} tokens dense", budget, tokens);
  std::vector<uint8_t> bytes(index.rows() * all.key_blocks, 255);
  for (int64_t row = 0; row < index.rows(); ++row) {
    const BlockIndex::Row list = index.row(row);
    for (size_t i = 0; i < list.blocks.size(); ++i) bytes[row * all.key_blocks + list.blocks[i]] = list.first[i];
  }
  const int32_t head[5] = {index.shape().list_heads, all.query_blocks, all.key_blocks, query_block,
                           index.shape().block};
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(head), sizeof(head));
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  SB_USER_CHECK(out.good(), "{} cannot be written", file);
  fmt::print("{}: {:.1f} % of the causal pairs\n", file,
             100.0 * static_cast<double>(index.token_pairs()) / static_cast<double>(index.causal_token_pairs()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: dump_lists MODEL FILE [TOKENS [BUDGET [QUERY_BLOCK]]]\n");
    return 2;
  }
  const auto number = [&](int i, int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  try {
    const int64_t tokens = number(3, 32768);
    run(argv[1], argv[2], tokens, number(4, tokens / 20), static_cast<int>(number(5, 128)));
  } catch (const std::exception& error) {
    fmt::print(stderr, "dump_lists: {}\n", error.what());
    return 1;
  }
  return 0;
}
