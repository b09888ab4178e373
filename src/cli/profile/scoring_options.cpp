#include "cli/profile/scoring_options.h"

#include <CLI/CLI.hpp>

#include "core/errors.h"
#include "plan/latency/workload.h"

namespace sb {

void add_scoring_options(CLI::App& command, AttentionSpec& spec) {
  command.add_option("--pattern", spec.pattern, "how pairs are selected")
      ->check(CLI::IsMember({"topk", "mass"}))
      ->capture_default_str();
  command.add_option("--score", spec.score, "how key blocks are scored")
      ->check(CLI::IsMember({"planes", "moments", "mean"}))
      ->capture_default_str();
  command.add_option("--score-channels", spec.score_channels, "score planes: channels per head used for scoring")
      ->check(CLI::Range(int64_t{2}, int64_t{1024}))
      ->capture_default_str();
  command
      .add_option("--score-tokens", spec.score_tokens,
                  "score moments, mean: keys of a block that are scored together; 0: the whole block")
      ->capture_default_str();
}

void check_scoring_options(const CLI::App& command, AttentionSpec& spec) {
  const bool planes = spec.score == "planes";
  SB_USER_CHECK(!planes || spec.score_tokens == 0,
                "--score-tokens {}: has no effect with --score planes, which scores every key by itself; remove it, or "
                "add --score moments",
                spec.score_tokens);
  SB_USER_CHECK(planes || command.count("--score-channels") == 0,
                "--score-channels: has no effect with --score {}; remove it", spec.score);
  SB_USER_CHECK(spec.score_channels % 2 == 0,
                "--score-channels {}: a rotary plane has two channels; use an even number", spec.score_channels);
  if (!planes) spec.score_channels = 0;
}

}  // namespace sb
