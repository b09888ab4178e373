#pragma once

#include <string>
#include <string_view>
#include <vector>

// The metrics of LongBench v1, as its published scoring defines them; every score is in 0 … 1.
namespace sb::longbench {

// Token F1 after lower-casing and removing punctuation, articles and extra white space.
double qa_f1(std::string_view prediction, std::string_view answer);
// For Chinese: punctuation removed, F1 over characters (Latin letters and digits stay together as words). The published
// script cuts words with a dictionary; characters need none and give slightly higher scores for partial matches.
double qa_f1_zh(std::string_view prediction, std::string_view answer);

// ROUGE-L F as the `rouge` package computes it: sentences end at full stops, the union of longest common subsequences
// counts every distinct word once.
double rouge_l(std::string_view prediction, std::string_view answer);
double rouge_l_zh(std::string_view prediction, std::string_view answer);

// Shares the point among all class names that the prediction contains (names inside the right one do not count).
double classification(std::string_view prediction, std::string_view answer, const std::vector<std::string>& classes);

// Share of the numbers in the prediction that are the paragraph's number.
double retrieval(std::string_view prediction, std::string_view answer);
double retrieval_zh(std::string_view prediction, std::string_view answer);
// Share of the numbers in the prediction that equal the answer.
double count(std::string_view prediction, std::string_view answer);

// Similarity (2·matches / total length, matching blocks as in Ratcliff–Obershelp) of the first line that is no comment,
// in whole hundredths.
double code_similarity(std::string_view prediction, std::string_view answer);

// The metric of a LongBench task ("narrativeqa", "gov_report", …) over all accepted answers, the best counting. Tasks
// whose answer is the first line cut the prediction there first. UserError for an unknown task.
double score(const std::string& task, std::string_view prediction, const std::vector<std::string>& answers,
             const std::vector<std::string>& classes);
std::vector<std::string> known_tasks();

}  // namespace sb::longbench
