#pragma once

namespace CLI {
class App;
}

// One function per sub-command, each in the file of its name. It adds the sub-command to the application with a
// callback that does the work. Errors are thrown (core/errors.h) and turned into exit codes by main; another exit code
// of its own is `throw CLI::RuntimeError(code)`.
namespace sb {

void add_bench_command(CLI::App& app);
void add_config_command(CLI::App& app);
void add_data_command(CLI::App& app);
void add_doctor_command(CLI::App& app);
void add_eval_command(CLI::App& app);
void add_init_command(CLI::App& app);
void add_train_command(CLI::App& app);
void add_merge_command(CLI::App& app);
void add_profile_command(CLI::App& app);
void add_report_command(CLI::App& app);
// completion and man: to be added last, since they print the others.
void add_shell_commands(CLI::App& app);
void add_simulate_command(CLI::App& app);

}  // namespace sb
