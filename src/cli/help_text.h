#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sb {

// What stands for an option's value: "INT", "{cpu,cuda}", "FILE"; empty: a flag.
std::string value_label(const CLI::Option& option);
// What an option does, and in parentheses its range and default and whether it is required.
std::string option_help(const CLI::Option& option);

// Prints help as these two say it, wrapped; before the sub-commands are added, which take it over.
void set_help_format(CLI::App& app);

}  // namespace sb
