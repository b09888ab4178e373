#include "train/index_dump.h"

#include <algorithm>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/cuda_attention.h"
#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/log.h"

namespace sb {
namespace fs = std::filesystem;

fs::path IndexDump::path(int layer) const {
  return folder_ / fmt::format("layer-{:02}.index", layer);
}

void IndexDump::forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                        const AttentionOperands& operands, AttentionState& state, bool replay) {
  ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
  if (!listens_ || replay || saved_.contains(layer)) return;
  const BlockIndex index =
      device_ == DeviceKind::cuda ? read_block_index(state, *exec.pool) : SparseAttention::index(state);
  if (std::ranges::all_of(index.sequences(), [](const BlockIndex::Sequence& sequence) { return sequence.dense; }))
    return;
  std::error_code error;
  fs::create_directories(folder_, error);
  SB_USER_CHECK(!error, "attention.dump_index: {} cannot be created: {}", folder_.string(), error.message());
  const fs::path target = path(layer), partial = target.string() + ".partial";
  index.save(partial.string());
  sync_file(partial);
  fs::rename(partial, target, error);
  SB_USER_CHECK(!error, "attention.dump_index: {} cannot be written: {}", target.string(), error.message());
  sync_directory(folder_);
  saved_.insert(layer);
  log::info("saved the block lists of layer {}: {}", layer, target.string());
}

}  // namespace sb
