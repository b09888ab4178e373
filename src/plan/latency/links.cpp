#include "plan/latency/links.h"

#include <fmt/format.h>

#include <map>

namespace sb {

double Links::collective(const Link& inside, const Link& between, double bytes, const LinkGroup& group,
                         int used) const {
  const auto moved = [&](int ranks) { return bytes * (ranks - 1) / ranks; };
  if (group.nodes == 1) return inside(moved(group.ranks));
  const double share = adapter_share(used);
  // One ring through all ranks: all adapters that the group has in a node carry it together, as far as its ranks can
  // take it on.
  const double by_adapters = between.us_per_byte / (group.fewest * share);
  const double ring =
      std::max(inside.latency_us, between.latency_us) + moved(group.ranks) * std::max(inside.us_per_byte, by_adapters);
  // What was measured is what the library does, whatever that is.
  if (measured || group.fewest == 1 || group.fewest * group.nodes != group.ranks) return ring;
  // Inside the nodes first: the adapters carry one node's part of the sums.
  const double across = between.latency_us + moved(group.nodes) / group.fewest * between.us_per_byte / share;
  return std::min(ring, inside(moved(group.fewest)) + across);
}

LinkGroup group_of_ranks(int width, int stride, int blocks, int block_stride, int node_ranks) {
  std::map<int, int> on_node;
  for (int block = 0; block < blocks; ++block)
    for (int i = 0; i < width; ++i) ++on_node[(block * block_stride + i * stride) / node_ranks];
  LinkGroup group{width * blocks, static_cast<int>(on_node.size()), width * blocks};
  for (const auto& [node, ranks] : on_node) group.fewest = std::min(group.fewest, ranks);
  return group;
}

std::string describe(const Links& links) {
  const auto text = [](const Link& link) {
    const double rate = 1e-3 / link.us_per_byte;
    return link.us_per_byte > 0 ? fmt::format("{:.{}f} GB/s + {:.0f} us", rate, rate < 10 ? 3 : 0, link.latency_us)
                                : fmt::format("{:.0f} us", link.latency_us);
  };
  return fmt::format(
      "{}; inside a node of {}: messages {}, reduce-scatter {}, all-gather {}; between nodes, each of {} adapter{}: "
      "{}, {}, {}",
      links.source, links.node_ranks, text(links.transfer_inside), text(links.reduce_inside), text(links.gather_inside),
      links.adapters, links.adapters == 1 ? "" : "s", text(links.transfer_between), text(links.reduce_between),
      text(links.gather_between));
}

Links assumed_links(const std::string& generation) {
  const auto link = [](double latency_us, double gigabytes) { return Link{latency_us, 1e-3 / gigabytes}; };
  const bool a100 = generation == "a100";
  Links links;
  links.source = "assumed from public measurements";
  links.transfer_inside = link(10, a100 ? 150 : 200);
  links.transfer_between = link(10, a100 ? 23 : 46);
  links.reduce_inside = links.gather_inside = link(20, a100 ? 180 : 300);
  links.reduce_between = links.gather_between = link(20, a100 ? 12.5 : 25);
  return links;
}

}  // namespace sb
