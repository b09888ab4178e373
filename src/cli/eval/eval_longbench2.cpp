#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_rows.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/files/regular_file.h"
#include "eval/multiple_choice.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

struct LongBench2Options {
  BenchmarkFiles files;
  std::string choose = "likelihood", prompt;
};

struct Question {
  std::string id, difficulty, length, prompt;
  char answer = 0;
};

std::string one_of(const Row& row, const char* key, std::initializer_list<std::string_view> values) {
  std::string value = row.text(key);
  SB_USER_CHECK(std::find(values.begin(), values.end(), value) != values.end(),
                "{}: \"{}\" is \"{}\", which does not exist in LongBench v2", row.place, key, value);
  return value;
}

Question question_of(const Row& row, const std::string& prompt) {
  Question question;
  question.id = row.text("_id");
  question.difficulty = one_of(row, "difficulty", {"easy", "hard"});
  question.length = one_of(row, "length", {"short", "medium", "long"});
  question.answer = one_of(row, "answer", {"A", "B", "C", "D"}).front();
  const ChoiceQuestion parts{row.text("context"),
                             row.text("question"),
                             {row.text("choice_A"), row.text("choice_B"), row.text("choice_C"), row.text("choice_D")}};
  question.prompt = fill_choice_template(prompt, parts);
  return question;
}

// What was said to each question: a text, or the likelihoods of the four letters.
struct Answers {
  std::vector<std::string> texts;
  std::vector<std::vector<double>> likelihoods;  // empty: texts were generated

  char choice(size_t i) const {
    if (likelihoods.empty()) return named_choice(texts[i]);
    const std::vector<double>& of_letters = likelihoods[i];
    return kChoiceLetters[static_cast<size_t>(std::max_element(of_letters.begin(), of_letters.end()) -
                                              of_letters.begin())];
  }
};

Answers ask(const EvalOptions& options, const LongBench2Options& bench, const std::vector<Question>& questions) {
  EvalModel model = open_model_to_run(options);
  Progress progress;
  const auto shown = [&](size_t done, size_t all) { show(progress, done, all, "questions"); };
  const AnswerOptions how{.chat = options.chat, .cut_middle = true};
  Answers answers;
  if (bench.choose == "generation") {
    std::vector<std::string> prompts;
    for (const Question& question : questions) prompts.push_back(question.prompt);
    answers.texts = model.answer(prompts, generation(options), shown, how);
    return answers;
  }
  std::vector<std::string> letters;
  for (const char letter : kChoiceLetters) letters.emplace_back(1, letter);
  for (const Question& question : questions) {
    answers.likelihoods.push_back(model.next(question.prompt, "The correct answer is (", letters, how));
    shown(answers.likelihoods.size(), questions.size());
  }
  return answers;
}

void run_longbench2(const EvalOptions& options, const LongBench2Options& bench) {
  std::string prompt(kPlainChoiceTemplate);
  if (!bench.prompt.empty()) {
    prompt = read_regular_file(bench.prompt);
    check_choice_template(bench.prompt, prompt);
  }
  const std::vector<Row> rows = read_rows(bench.files);
  std::vector<Question> questions;
  for (const Row& row : rows) questions.push_back(question_of(row, prompt));
  Answers answers;
  if (bench.files.predictions.empty())
    answers = ask(options, bench, questions);
  else
    answers.texts = read_predictions(bench.files, rows);

  MeanScore overall;
  std::map<std::string, MeanScore> parts;
  Json scored = Json::array();
  int64_t without = 0;
  for (size_t i = 0; i < questions.size(); ++i) {
    const Question& question = questions[i];
    const char choice = answers.choice(i);
    const bool right = choice == question.answer;
    without += choice == 0;
    for (MeanScore* mean : {&overall, &parts[question.difficulty], &parts[question.length]}) mean->add(right);
    Json row = {{"_id", question.id},
                {"difficulty", question.difficulty},
                {"length", question.length},
                {"answer", std::string(1, question.answer)},
                {"choice", choice == 0 ? Json() : Json(std::string(1, choice))}};
    if (answers.likelihoods.empty())
      row["pred"] = answers.texts[i];
    else
      row["loglikelihoods"] = answers.likelihoods[i];
    scored.push_back(row);
  }
  Json by_part = Json::object();
  for (const char* name : {"easy", "hard", "short", "medium", "long"}) {
    if (parts[name].samples() == 0) continue;
    std::printf("%-8s %s\n", name, parts[name].text().c_str());
    by_part[name] = Json::parse(parts[name].json());
  }
  std::printf("%s: %s", bench.files.input.c_str(), overall.text().c_str());
  if (without > 0) std::printf(", %lld of which name no choice", static_cast<long long>(without));
  std::printf("\n");
  Json results = {{"task", "longbench2"}};
  results.update(Json::parse(overall.json()));
  results["parts"] = by_part;
  results["rows"] = scored;
  write_json(options, results.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void add_eval_longbench2(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  options->max_new_tokens = 128;
  auto bench = std::make_shared<LongBench2Options>();
  bench->files.takes_an_array = true;
  CLI::App* command =
      eval.add_subcommand("longbench2", "LongBench v2: score multiple-choice questions, by difficulty and length");
  add_common(command, *options, false);
  add_sampling(command, *options);
  add_files(command, bench->files, "LongBench v2's data.json, or the same as JSONL");
  command
      ->add_option(
          "--choose", bench->choose,
          "likelihood: the likeliest letter after \"The correct answer is (\"; generation: the letter that the "
          "model writes")
      ->check(CLI::IsMember({"likelihood", "generation"}))
      ->capture_default_str();
  command->add_option("--prompt", bench->prompt, "one of LongBench v2's prompt templates, such as prompts/0shot.txt");
  command->callback([=] { run_longbench2(*options, *bench); });
}

}  // namespace sb
