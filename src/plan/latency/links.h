#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace sb {

// Time to move bytes: latency + bytes · rate.
struct Link {
  double latency_us = 0;
  double us_per_byte = 0;
  double operator()(double bytes) const { return latency_us + bytes * us_per_byte; }
};

// The ranks of a collective: how many there are, on how many nodes, and how many of them the node with the fewest has.
struct LinkGroup {
  int ranks = 1, nodes = 1, fewest = 1;
};

// How fast data gets from rank to rank. Nodes have network adapters, which their ranks share evenly; one rank uses one
// adapter at most.
struct Links {
  std::string source;     // what to say of them: "assumed", or the file that was measured
  bool measured = false;  // between ranks, and not assumed
  int node_ranks = 8;
  int adapters = 8;                        // of a node
  Link transfer_inside, transfer_between;  // a message between two ranks; between nodes: through one adapter
  Link reduce_inside, gather_inside;       // reduce-scatter, all-gather: per byte · (n-1)/n
  Link reduce_between, gather_between;     // the same, for every adapter that the group has in a node

  // How much of an adapter a rank has, where so many ranks of a node are in use.
  double adapter_share(int used) const {
    return std::min(1.0, static_cast<double>(adapters) / static_cast<double>(std::max(used, 1)));
  }
  // A message between two nodes, while all ranks in use on them may send.
  Link between(int used) const {
    return {transfer_between.latency_us, transfer_between.us_per_byte / adapter_share(used)};
  }
  double reduce(double bytes, const LinkGroup& group, int used) const {
    return collective(reduce_inside, reduce_between, bytes, group, used);
  }
  double gather(double bytes, const LinkGroup& group, int used) const {
    return collective(gather_inside, gather_between, bytes, group, used);
  }

 private:
  // `bytes`: of the whole, of which every rank has one part before or after.
  double collective(const Link& inside, const Link& between, double bytes, const LinkGroup& group, int used) const;
};

// Of ranks that stand `stride` apart in `blocks` blocks of `width`, the blocks `block_stride` apart.
LinkGroup group_of_ranks(int width, int stride, int blocks, int block_stride, int node_ranks);

// "200 GB/s + 10 us inside a node of 8, …"
std::string describe(const Links& links);

// What public measurements say of nodes of eight GPUs with an adapter each (docs/balancing.md names them): "h100",
// which stands for every GPU with its NVLink, or "a100".
Links assumed_links(const std::string& generation = "h100");

}  // namespace sb
