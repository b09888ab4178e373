#include "cli/profile/scoring_options.h"

#include <CLI/CLI.hpp>

#include "core/errors.h"
#include "plan/latency/workload.h"

namespace sb {

void add_scoring_options(CLI::App& command, AttentionSpec& spec) {
  command.add_option("--pattern", spec.pattern, "how pairs are selected")
      ->check(CLI::IsMember({"topk", "mass"}))
      ->capture_default_str();
  command.add_option("--score", spec.score, "what key blocks are judged by")
      ->check(CLI::IsMember({"planes", "moments", "mean"}))
      ->capture_default_str();
  command.add_option("--score-channels", spec.score_channels, "planes: channels of a head that are multiplied")
      ->check(CLI::Range(int64_t{2}, int64_t{1024}))
      ->capture_default_str();
  command
      .add_option("--score-tokens", spec.score_tokens, "other scores: keys that selection judges together; 0: a block")
      ->capture_default_str();
}

void check_scoring_options(const CLI::App& command, AttentionSpec& spec) {
  const bool planes = spec.score == "planes";
  SB_USER_CHECK(
      !planes || spec.score_tokens == 0,
      "--score-tokens {} with --score planes, which looks at every key by itself; leave it out, or add --score "
      "moments",
      spec.score_tokens);
  SB_USER_CHECK(planes || command.count("--score-channels") == 0, "--score-channels: --score {} has none; leave it out",
                spec.score);
  SB_USER_CHECK(spec.score_channels % 2 == 0,
                "--score-channels {}: a rotary plane has two channels; use an even number", spec.score_channels);
  if (!planes) spec.score_channels = 0;
}

}  // namespace sb
