#pragma once

namespace CLI {
class App;
}

// The sub-commands of `sparsebalance data`.
namespace sb {

void add_data_tokenize(CLI::App& data);
void add_data_stats(CLI::App& data);
void add_data_check(CLI::App& data);
void add_data_show(CLI::App& data);
void add_data_synth(CLI::App& data);
void add_data_lengths(CLI::App& data);
void add_data_merge(CLI::App& data);
void add_data_split(CLI::App& data);

}  // namespace sb
