// The newest token on a GPU beside sums in double on the host: groups that are no multiple of what a thread block has,
// blocks that are not full, lists.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <optional>

#include "core/random.h"
#include "device/context.h"
#include "device/cuda.h"
#include "device/float16.h"
#include "device/host_floats.h"
#include "device/memory.h"
#include "eval/gpu/decode.h"

namespace sb {
namespace {

struct Case {
  int heads, kv_heads, head_dim;
  DType dtype;
};

class CudaDecode : public testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kCapacity = 1000;

  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    context_ = std::make_unique<DeviceContext>(DeviceKind::cuda, pool_, int64_t{1} << 26);
    memory_.emplace(make_arena("test", int64_t{1} << 26, DeviceKind::cuda));
  }

  // On the device, rounded to the type; what it holds then is `values`.
  TensorView random(Shape shape, uint64_t seed, std::vector<float>& values) {
    const TensorView tensor = memory_->allocate(GetParam().dtype, shape);
    HostCopy copy(tensor);
    Random random(seed);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const auto value = static_cast<float>(random.normal());
      if (tensor.dtype() == DType::f32)
        copy.view().f32()[i] = value;
      else
        static_cast<uint16_t*>(copy.view().raw())[i] = bf16_from_f32(value);
    }
    copy.store();
    const HostFloats held(tensor);
    values.assign(held.values().begin(), held.values().end());
    return tensor;
  }

  AttentionShape shape() const {
    const Case& it = GetParam();
    return {it.heads, it.kv_heads, it.head_dim, 1.0f / std::sqrt(static_cast<float>(it.head_dim))};
  }

  ThreadPool pool_{2};
  std::unique_ptr<DeviceContext> context_;
  std::optional<Arena> memory_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaDecode,
                         testing::Values(Case{4, 2, 16, DType::f32}, Case{14, 2, 64, DType::bf16},
                                         Case{20, 2, 128, DType::bf16}, Case{3, 1, 80, DType::f32},
                                         Case{16, 1, 256, DType::f32}, Case{5, 5, 96, DType::bf16}),
                         [](const auto& place) {
                           return fmt::format("h{}_kv{}_d{}_{}", place.param.heads, place.param.kv_heads,
                                              place.param.head_dim, dtype_name(place.param.dtype));
                         });

struct Values {
  std::vector<float> q, k, v;
};

std::vector<double> expected(const AttentionShape& shape, const Values& values, int head,
                             const std::vector<int64_t>& keys) {
  const int d = shape.head_dim, kv_head = head / shape.group();
  std::vector<double> scores, out(static_cast<size_t>(d));
  const auto at = [&](int64_t key) { return static_cast<size_t>((key * shape.kv_heads + kv_head) * d); };
  for (const int64_t key : keys) {
    double product = 0;
    for (int c = 0; c < d; ++c)
      product += double{values.q[static_cast<size_t>(head * d + c)]} * values.k[at(key) + static_cast<size_t>(c)];
    scores.push_back(shape.scale * product);
  }
  const double top = *std::ranges::max_element(scores);
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - top);
  for (size_t i = 0; i < keys.size(); ++i)
    for (int c = 0; c < d; ++c)
      out[static_cast<size_t>(c)] += scores[i] / sum * values.v[at(keys[i]) + static_cast<size_t>(c)];
  return out;
}

TEST_P(CudaDecode, IsTheSoftmaxOverTheKeysThatItSees) {
  const AttentionShape heads = shape();
  const int d = heads.head_dim;
  Values values;
  cuda::DecodeParams params;
  params.shape = heads;
  params.q = random({1, heads.heads, d}, 1, values.q);
  params.k = random({kCapacity, heads.kv_heads, d}, 2, values.k);
  params.v = random({kCapacity, heads.kv_heads, d}, 3, values.v);
  params.out = memory_->allocate(GetParam().dtype, {1, heads.heads, d});
  for (const auto& [tokens, block, listed] :
       {std::tuple(1, 128, false), std::tuple(128, 128, false), std::tuple(129, 128, false),
        std::tuple(1000, 128, false), std::tuple(700, 64, true), std::tuple(1000, 128, true)}) {
    SCOPED_TRACE(fmt::format("{} tokens, blocks of {}, {}", tokens, block, listed ? "listed" : "all"));
    params.tokens = tokens;
    params.block = block;
    params.room = (kCapacity + block - 1) / block;
    std::vector<int32_t> lists(static_cast<size_t>(heads.kv_heads * (params.room + 1)));
    std::vector<std::vector<int64_t>> seen(static_cast<size_t>(heads.kv_heads));
    for (int h = 0; h < heads.kv_heads; ++h) {
      int32_t* list = lists.data() + h * (params.room + 1);
      for (int b = 0; b * block < tokens; ++b) {
        // Another selection under every kv head, with the last block always.
        if (listed && (b + h) % 3 != 0 && (b + 1) * block < tokens) continue;
        list[++list[0]] = b;
        for (int64_t key = b * block; key < std::min<int64_t>(tokens, (b + 1) * block); ++key)
          seen[static_cast<size_t>(h)].push_back(key);
      }
    }
    const TensorView sent = memory_->allocate(DType::i32, {std::ssize(lists)});
    cuda::copy_and_wait(lists.data(), sent.raw(), sent.bytes());
    params.lists = listed ? static_cast<const int32_t*>(sent.raw()) : nullptr;
    cuda::decode_attention(context_->exec(), params);
    const HostFloats out(params.out);
    for (int h = 0; h < heads.heads; ++h) {
      const std::vector<double> want = expected(heads, values, h, seen[static_cast<size_t>(h / heads.group())]);
      for (int c = 0; c < d; ++c)
        ASSERT_NEAR(out.values()[static_cast<size_t>(h * d + c)], want[static_cast<size_t>(c)],
                    GetParam().dtype == DType::f32 ? 1e-5 : 0.02)
            << "head " << h << ", channel " << c;
    }
  }
}

TEST_P(CudaDecode, StatisticsAreThoseOfTheHost) {
  const AttentionShape heads = shape();
  std::vector<float> keys;
  const TensorView k = random({512, heads.kv_heads, heads.head_dim}, 4, keys);
  LayerPlanes planes{heads.kv_heads, 6, {}, {}, {}};
  for (int h = 0; h < heads.kv_heads; ++h)
    for (int c = 0; c < 6; ++c) planes.channel.push_back((h + 2 * c) % heads.head_dim);
  planes.scale.assign(static_cast<size_t>(heads.kv_heads), 1.0f);
  planes.key_mean.assign(planes.channel.size(), 0.0f);
  for (const BlockScoring& scoring :
       {BlockScoring(BlockScore::moments, 128), BlockScoring(BlockScore::mean, 64),
        BlockScoring(BlockScore::moments, 128, 16), BlockScoring(BlockScore::planes, 128, 0, 6)}) {
    std::vector<float> want(static_cast<size_t>(BlockStatistics::floats(scoring, heads, 512 / scoring.block)));
    BlockStatistics::fill({.pool = &pool_}, heads, scoring, keys.data(), 512, want.data(), &planes);
    const std::vector<float> got = cuda::block_statistics(context_->exec(), heads, scoring, k, &planes);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      if (scoring.planes())
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i])) << i;
      else
        ASSERT_NEAR(got[i], want[i], 1e-5) << i;
    }
  }
}

}  // namespace
}  // namespace sb
