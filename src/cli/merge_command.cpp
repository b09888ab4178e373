#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "core/errors.h"
#include "core/thread_pool.h"
#include "model/adapter/merge.h"
#include "run/checkpoint/new_directory.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

struct MergeArguments {
  std::string base, adapter, out, dtype = "auto";
  int threads = 0;
};

void merge(const MergeArguments& arguments) {
  fs::path out = arguments.out;
  if (out.filename().empty()) out = out.parent_path();
  SB_USER_CHECK(!fs::exists(out), "{}: already exists; name a new directory", out.string());
  const fs::path parent = fs::absolute(out).parent_path();
  SB_USER_CHECK(fs::is_directory(parent), "{}: no such directory", parent.string());
  SB_USER_CHECK(fs::is_directory(arguments.base), "{}: no such directory", arguments.base);
  MergeOptions options;
  options.base = arguments.base;
  options.adapter = arguments.adapter;
  options.config = read_model_config(options.base / "config.json");
  if (arguments.dtype != "auto") options.dtype = arguments.dtype == "bfloat16" ? DType::bf16 : DType::f32;
  ThreadPool pool(arguments.threads > 0 ? arguments.threads : available_cores());
  write_directory_atomically(fs::absolute(out),
                             [&](const fs::path& temporary) { merge_adapter(pool, options, temporary); });
  fmt::print("wrote {}\n", out.string());
}

}  // namespace

void add_merge_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("merge", "merge a LoRA adapter into the weights of its model");
  auto a = std::make_shared<MergeArguments>();
  command->add_option("base", a->base, "Hugging Face directory of the base model")->required();
  command->add_option("adapter", a->adapter, "PEFT directory of the adapter, such as `final/` of a run with `lora`")
      ->required();
  command->add_option("out", a->out, "new directory for the merged model")->required();
  command
      ->add_option("--dtype", a->dtype,
                   "dtype of the merged weights; auto: bfloat16 if all of the base model is, otherwise float32")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}))
      ->capture_default_str();
  command->add_option("--threads", a->threads, "worker threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([a] { merge(*a); });
}

}  // namespace sb
