// What ranks that share products send each other while they compute.
#include "parallel/tensor_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/thread_communicator.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

// The hardest transfers that are allowed: nothing moves before somebody waits, and until then neither what was sent nor
// what will be received is there. Whoever reads rows too early gets this, and whoever writes to them is found.
constexpr unsigned char kPoison = 0xff;  // a NaN

class LateGroup final : public TensorGroup {
 public:
  explicit LateGroup(TensorGroup& group) : group_(group) {}

  TensorShare share() const override { return group_.share(); }
  CommRequest gather(TensorView all) override {
    return late(all, [this](TensorView rows) { return group_.gather(rows); });
  }
  CommRequest reduce_scatter(TensorView all) override {
    return late(all, [this](TensorView rows) { return group_.reduce_scatter(rows); });
  }

  // How many were under way at once, at most, since the last call.
  int take_most_under_way() { return std::exchange(most_under_way_, under_way_); }
  // How many of those that ended so far had the numbers of `watched` change on their way: something was computed then.
  int beside_changes() const { return beside_changes_; }
  void watch(TensorView watched) { watched_ = watched; }

 private:
  using Operation = std::function<CommRequest(TensorView)>;

  class Late final : public CommRequest::State {
   public:
    Late(LateGroup& group, TensorView all, Operation operation)
        : group_(group), all_(all), operation_(std::move(operation)) {
      sent_.assign(bytes(), bytes() + all.bytes());
      seen_ = group_.watched_values();
      std::fill(bytes(), bytes() + all.bytes(), kPoison);
      group_.most_under_way_ = std::max(group_.most_under_way_, ++group_.under_way_);
    }
    void wait() override {
      EXPECT_TRUE(std::all_of(bytes(), bytes() + all_.bytes(), [](unsigned char byte) { return byte == kPoison; }))
          << "rows were written to on their way";
      std::copy(sent_.begin(), sent_.end(), bytes());
      operation_(all_).wait();
      --group_.under_way_;
      group_.beside_changes_ += seen_ != group_.watched_values();
    }
    bool done() override { return false; }
    void abandon() override {}

   private:
    unsigned char* bytes() const { return static_cast<unsigned char*>(all_.raw()); }

    LateGroup& group_;
    TensorView all_;
    Operation operation_;
    std::vector<unsigned char> sent_;
    std::vector<float> seen_;
  };

  CommRequest late(TensorView all, Operation operation) {
    return CommRequest(std::make_unique<Late>(*this, all, std::move(operation)));
  }

  std::vector<float> watched_values() const {
    return watched_.empty() ? std::vector<float>() : std::vector(watched_.f32(), watched_.f32() + watched_.elements());
  }

  TensorGroup& group_;
  TensorView watched_;
  int under_way_ = 0, most_under_way_ = 0, beside_changes_ = 0;
};

struct StepResult {
  LossSums loss;
  std::vector<float> gradients;
  int most_in_forward = 0;   // under way at once
  int beside_gradients = 0;  // of all transfers, those beside which gradients were computed
};

StepResult step_of_rank(const ModelConfig& config, StageOptions options, Communicator& world, bool late) {
  TensorRanks ranks(world);
  LateGroup late_group(ranks);
  options.tensor = ranks.share();
  NaiveAttention attention;
  Stage stage(config, options, attention, 1, late ? static_cast<TensorGroup*>(&late_group) : &ranks);
  randomize(stage.parameters(), 5 + static_cast<uint64_t>(world.rank()));
  const TensorView gradients = stage.parameters().gradients();
  late_group.watch(gradients);
  TestExec run(1);
  const MicroBatch batch = random_batch({17, 20}, config.vocab_size, 1);
  stage.forward(run.exec, batch, 0, {});
  const int most = late_group.take_most_under_way(), before = late_group.beside_changes();
  stage.backward(run.exec, batch, 0, {});
  return {stage.loss(0),
          {gradients.f32(), gradients.f32() + gradients.elements()},
          most,
          late_group.beside_changes() - before};
}

// 37 tokens in one piece, in five.
TEST(TensorRanksOverlap, TransfersRunBesideProductsAndNobodyTouchesTheirRows) {
  for (const ModelConfig::Family family : kFamilies) {
    for (const Recompute recompute : kLevels) {
      for (const auto& [chunk, pieces] : {std::pair<int64_t, int>{1000, 1}, {8, 5}}) {
        ModelConfig config = tiny_config(family);
        config.layers = 2;
        config.intermediate_size = 12;
        StageOptions options = whole_model(config, 37, recompute);
        options.layer_chunk = chunk;
        // Of every piece two sums of input gradients travel beside those of the weights, and of every piece but the
        // first four gathers (twice rows, twice gradients) began before the last one's. Where the MLP's input need not
        // be computed again, the first piece's is not needed before the gradients of the down projection are there.
        const int beside = config.layers * (2 * pieces + 4 * (pieces - 1) + (recompute == Recompute::none ? 1 : 0));
        std::mutex mutex;
        run_thread_ranks(2, [&, pieces = pieces](Communicator& world) {
          const StepResult plain = step_of_rank(config, options, world, /*late=*/false),
                           late = step_of_rank(config, options, world, /*late=*/true);
          std::lock_guard lock(mutex);
          EXPECT_EQ(plain.loss.weighted, late.loss.weighted);
          EXPECT_EQ(plain.gradients, late.gradients);
          // The rows of the next piece, and the sums of this one and of the last.
          EXPECT_EQ(late.most_in_forward, pieces > 1 ? 3 : 1);
          EXPECT_EQ(late.beside_gradients, beside) << "recompute " << static_cast<int>(recompute);
        });
      }
    }
  }
}

// Every token is on one rank, pieces cover all tokens, and a rank's rows lie back to back.
TEST(TokenShares, DivideEveryPiece) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const int64_t chunk : {int64_t{5}, int64_t{4096}, int64_t{32768}}) {
      for (const int64_t tokens : {0, 1, 7, 2047, 2048, 2049, 8191, 8192, 8193, 40000, 131073}) {
        int64_t covered = 0, rows = 0, pieces = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const TokenShares shares({ranks, rank}, chunk);
          int64_t begin = 0, own = 0;
          pieces = 0;
          shares.each_piece(tokens, [&](const TokenShares::Piece& piece) {
            EXPECT_EQ(piece.begin, begin);
            EXPECT_EQ(piece.own_begin, own);
            EXPECT_LE(piece.tokens(), shares.largest_piece(tokens));
            EXPECT_LE(piece.tokens(), chunk + ranks - 1);
            EXPECT_LE(piece.rows * ranks, shares.padded_piece(tokens));
            begin = piece.end;
            own = piece.own_end;
            ++pieces;
          });
          covered = begin;
          EXPECT_EQ(shares.own(tokens), own);
          EXPECT_LE(own, shares.most(tokens));
          EXPECT_EQ(shares.pieces(tokens), pieces);
          rows += own;
        }
        EXPECT_EQ(covered, tokens);
        EXPECT_EQ(rows, tokens) << ranks << " ranks, pieces of " << chunk;
        if ((ranks == 2 || ranks == 8) && chunk == 32768) {
          EXPECT_EQ(pieces, tokens > 131072 ? 5 : std::min<int64_t>(4, (tokens + 2047) / 2048)) << tokens;
        }
      }
    }
  }
}

// What a plan for the most tokens allows is enough for fewer.
TEST(TokenShares, NeverNeedMoreForFewerTokens) {
  for (const int ranks : {2, 3, 7}) {
    const TokenShares shares({ranks, 0}, 3000);
    int64_t pieces = 0, largest = 0;
    for (int64_t tokens = 1; tokens < 20000; ++tokens) {
      EXPECT_GE(shares.pieces(tokens), pieces) << tokens;
      EXPECT_GE(shares.padded_piece(tokens), largest) << tokens;
      pieces = shares.pieces(tokens);
      largest = shares.padded_piece(tokens);
    }
  }
}

}  // namespace
}  // namespace sb::test
