#pragma once

namespace CLI {
class App;
}

namespace sb {

struct AttentionSpec;

// --pattern, --score, --score-channels and --score-tokens: how pairs are selected.
void add_scoring_options(CLI::App& command, AttentionSpec& spec);
// After parsing: UserError where they do not fit each other. Scores other than planes have no channels.
void check_scoring_options(const CLI::App& command, AttentionSpec& spec);

}  // namespace sb
