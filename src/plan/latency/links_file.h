#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/latency/links.h"

namespace sb {

// What `sparsebalance profile --links` measured between the ranks of a run, over their host memory and over that of
// their GPUs.
struct MeasuredLinks {
  static constexpr int kVersion = 1;
  struct Way {
    std::string over;  // "MPI", "NCCL", "MPI through host memory"
    Links links;
  };
  std::string date;
  std::vector<std::string> hosts;  // of every rank
  std::optional<Way> host, gpu;
};

std::string write_links(const MeasuredLinks& measured);
// UserError names `where` and the key.
MeasuredLinks parse_links(const std::string& text, const std::string& where);
MeasuredLinks read_links_file(const std::string& path);
// Those of the way that the run takes, or UserError; its source names the file.
Links links_for(const MeasuredLinks& measured, bool gpu, const std::string& path);

// What is different where a run with these hosts, one for every rank, uses them; empty: nothing. One host is as good as
// another as long as the ranks are divided alike.
std::string measured_elsewhere(const MeasuredLinks& measured, const std::vector<std::string>& hosts);

}  // namespace sb
