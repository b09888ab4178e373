#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/help_text.h"

// Shell completion and the manual page, from the same tables that the command line is parsed with.
namespace sb {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<const CLI::Option*> options_of(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return !option->get_lnames().empty(); });
}

// Every command with the words that lead to it ("sparsebalance data stats").
void each_command(const CLI::App& app, const std::string& path,
                  const std::function<void(const CLI::App&, const std::string&)>& visit) {
  visit(app, path);
  for (const CLI::App* command : commands_of(app)) each_command(*command, path + " " + command->get_name(), visit);
}

std::string bash_completion(const CLI::App& app) {
  std::string cases;
  each_command(app, app.get_name(), [&](const CLI::App& command, const std::string& path) {
    std::vector<std::string> words;
    for (const CLI::App* next : commands_of(command)) words.push_back(next->get_name());
    for (const CLI::Option* option : options_of(command)) words.push_back("--" + option->get_lnames().front());
    cases += fmt::format("    \"{}\") words=\"{}\" ;;\n", path, fmt::join(words, " "));
  });
  std::vector<std::string> all;
  each_command(app, app.get_name(),
               [&](const CLI::App&, const std::string& path) { all.push_back("\"" + path + "\""); });
  return "# bash completion of sparsebalance; written by `sparsebalance completion`.\n"
         "# zsh reads it, too: autoload -U +X bashcompinit && bashcompinit, then source this file.\n"
         "_sparsebalance() {\n"
         "  local current=\"${COMP_WORDS[COMP_CWORD]}\" path=\"sparsebalance\" word words=\"\" i\n"
         "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
         "    word=\"$path ${COMP_WORDS[i]}\"\n"
         "    case \"$word\" in\n"
         "    " +
         fmt::format("{}", fmt::join(all, "|")) +
         ") path=\"$word\" ;;\n"
         "    esac\n"
         "  done\n"
         "  case \"$path\" in\n" +
         cases +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  # Anything else is a file.\n"
         "  if [[ ${#COMPREPLY[@]} -eq 0 ]]; then COMPREPLY=($(compgen -f -- \"$current\")); fi\n"
         "}\n"
         "complete -o filenames -F _sparsebalance sparsebalance\n";
}

// Text as roff takes it: no backslashes, and no line that begins with a dot or a quote.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
  }
  return out;
}

std::string manual_page(const CLI::App& app) {
  std::string text = fmt::format(
      ".TH SPARSEBALANCE 1 \"\" \"{}\" \"User Commands\"\n.SH NAME\nsparsebalance \\- train long-context language "
      "models with sparse attention and balanced steps\n.SH SYNOPSIS\n.B sparsebalance\n.I COMMAND\n[options]\n",
      roff(app.version()));
  each_command(app, app.get_name(), [&](const CLI::App& command, const std::string& path) {
    text += fmt::format(".SH \"{}\"\n{}\n", roff(path), roff(command.get_description()));
    for (const CLI::Option* option : command.get_options()) {
      if (option->get_description().empty()) continue;
      const std::string name = option->get_lnames().empty() ? option->get_name() : "--" + option->get_lnames().front();
      const std::string label = option->get_lnames().empty() ? "" : value_label(*option);
      text +=
          fmt::format(".TP\n.B {}\n{}\n", roff(label.empty() ? name : name + " " + label), roff(option_help(*option)));
    }
  });
  return text +
         ".SH EXIT STATUS\n"
         "0 success, 1 another rank was lost, 2 error in the input, 3 out of memory, 70 internal error.\n";
}

}  // namespace

void add_shell_commands(CLI::App& app) {
  app.add_subcommand("completion", "print shell completion for bash and zsh: source <(sparsebalance completion)")
      ->callback([&app] { std::fputs(bash_completion(app).c_str(), stdout); });
  app.add_subcommand("man", "print the manual page: sparsebalance man | man -l -")->callback([&app] {
    std::fputs(manual_page(app).c_str(), stdout);
  });
}

}  // namespace sb
