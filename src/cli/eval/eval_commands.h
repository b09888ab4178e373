#pragma once

namespace CLI {
class App;
}

// The sub-commands of `sparsebalance eval`, one file each but for ruler and longbench.
namespace sb {

void add_eval_ppl(CLI::App& eval);
void add_eval_needle(CLI::App& eval);
void add_eval_ruler(CLI::App& eval);
void add_eval_longbench(CLI::App& eval);
void add_eval_longbench2(CLI::App& eval);
void add_eval_infinitebench(CLI::App& eval);
void add_eval_generate(CLI::App& eval);
void add_eval_serve(CLI::App& eval);

}  // namespace sb
