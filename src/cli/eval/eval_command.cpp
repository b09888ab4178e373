#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/eval/eval_commands.h"

namespace sb {

void add_eval_command(CLI::App& app) {
  CLI::App* eval =
      app.add_subcommand("eval", "evaluate a model: perplexity, needles, RULER, LongBench, InfiniteBench, generation");
  eval->require_subcommand(1);
  add_eval_ppl(*eval);
  add_eval_needle(*eval);
  add_eval_ruler(*eval);
  add_eval_longbench(*eval);
  add_eval_longbench2(*eval);
  add_eval_infinitebench(*eval);
  add_eval_generate(*eval);
  add_eval_serve(*eval);
}

}  // namespace sb
