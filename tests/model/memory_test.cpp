// The memory plan against what the system says the process takes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "core/random.h"
#include "model/stage/stage.h"

namespace sb {
namespace {

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

void add_sequence(MicroBatch& batch, int64_t tokens, int32_t shift, float weight) {
  for (int32_t i = 0; i < tokens; ++i) {
    batch.tokens.push_back(i % 100);
    batch.positions.push_back(i);
    batch.labels.push_back((i + shift) % 100);
    batch.weights.push_back(weight);
  }
  batch.cu_seqlens.push_back(static_cast<int32_t>(batch.size()));
}

TEST(MemoryTest, ResidentMemoryIsWithinFivePercentOfThePlan) {
#ifdef SB_ADDRESS_SANITIZER
  GTEST_SKIP() << "the sanitizer's own memory counts too";
#endif
  ModelConfig config;
  config.vocab_size = 4096;
  config.hidden_size = 256;
  config.intermediate_size = 704;
  config.layers = 4;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.qkv_bias = true;
  StageOptions options;
  options.last_layer = config.layers;
  options.recompute = Recompute::none;
  options.slots = 2;
  options.loss_chunk = 256;
  ThreadPool pool(2);
  Exec exec;
  exec.pool = &pool;
  DenseAttention attention;
  const auto run = [&](int64_t tokens) {
    options.max_micro_batch_tokens = options.max_sequence_length = tokens;
    MicroBatch batch;
    add_sequence(batch, tokens, 1, 1.0f / static_cast<float>(tokens));
    const int64_t before = resident_bytes();
    Stage stage(config, options, attention, 2);
    stage.initialize(1);
    stage.evaluate(exec, batch, 0, {});
    stage.forward(exec, batch, 0, {});
    stage.forward(exec, batch, 1, {});
    stage.backward(exec, batch, 0, {});
    stage.backward(exec, batch, 1, {});
    return resident_bytes() - before;
  };
  config.layers = options.last_layer = 1;
  run(64);  // the libraries' own buffers are there from now on
  config.layers = options.last_layer = 4;
  const int64_t taken = run(1024);
  const int64_t planned = Stage::memory_plan(config, options, attention, 2).total();
  EXPECT_GT(planned, 100'000'000);
  EXPECT_NEAR(static_cast<double>(taken) / static_cast<double>(planned), 1, 0.05)
      << "planned " << planned << ", taken " << taken;
}

// Packed sequences of ever-changing lengths, dense and sparse ones.
TEST(MemoryTest, TwoHundredStepsOfChangingLengthsTakeNoMoreMemory) {
#ifdef SB_ADDRESS_SANITIZER
  GTEST_SKIP() << "the sanitizer keeps freed memory";
#endif
  ModelConfig config;
  config.vocab_size = 512;
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.layers = 3;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 64;
  StageOptions options;
  options.last_layer = config.layers;
  options.max_micro_batch_tokens = options.max_sequence_length = 1024;
  options.offload = 1;
  SparseAttention::Options sparse;
  sparse.selection.block = 64;
  sparse.selection.budget = 320;
  sparse.layers = config.layers;
  SparseAttention attention(sparse);
  ThreadPool pool(2);
  Exec exec;
  exec.pool = &pool;
  Stage stage(config, options, attention, 2);
  stage.initialize(1);
  Random random(5);
  int64_t early = 0;
  for (int step = 1; step <= 200; ++step) {
    MicroBatch batch;
    const int64_t total = step == 17 ? 1024 : 1 + static_cast<int64_t>(random.below(1024));  // the largest, once
    while (batch.size() < total) {
      const auto length = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(total - batch.size())));
      add_sequence(batch, length, step, 1e-3f);
    }
    stage.forward(exec, batch, 0, {});
    stage.backward(exec, batch, 0, {});
    if (step == 60) early = resident_bytes();
  }
  // What the lists of longer sequences still add, and the allocator's own unevenness.
  EXPECT_LE(resident_bytes() - early, int64_t{3} << 20);
}

}  // namespace
}  // namespace sb
