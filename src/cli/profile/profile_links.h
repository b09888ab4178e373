#pragma once

#include <string>

namespace sb {

// `sparsebalance profile --links`: the links between the ranks that a launcher has started, or as many as asked for.
struct LinkArguments {
  std::string out;
  int ranks = 0;     // 0: as started
  bool gpu = false;  // between their GPUs too
};
void profile_links(const LinkArguments& arguments);

}  // namespace sb
