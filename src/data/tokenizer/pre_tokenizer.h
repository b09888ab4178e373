#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sb {

// A compiled regular expression of a tokenizer. The syntax is what Hugging Face's engine (Oniguruma) and PCRE2 share;
// white space means Unicode's White_Space in both. Immutable, shared by threads.
class SplitPattern {
 public:
  // `name` names the file in error messages.
  SplitPattern(const std::string& pattern, bool literal, const std::string& name);
  ~SplitPattern();
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;

  // What a thread needs for matching.
  class Matcher {
   public:
    Matcher();
    ~Matcher();
    Matcher(const Matcher&) = delete;
    Matcher& operator=(const Matcher&) = delete;

   private:
    friend class SplitPattern;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  struct Match {
    size_t begin = 0, end = 0;
  };
  // The first non-empty match at or after `from`; false when there is none. The text is valid UTF-8.
  bool find(std::string_view text, size_t from, Matcher& matcher, Match& match) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

enum class SplitBehavior { isolated, removed };

// One step of cutting text into pieces before the merges.
struct SplitStage {
  SplitPattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // the gaps are the separators
};

// GPT-2's expression, which a ByteLevel pre-tokenizer applies unless told not to.
extern const char kGpt2Pattern[];

}  // namespace sb
