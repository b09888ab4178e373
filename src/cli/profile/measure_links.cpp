#include "cli/profile/measure_links.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <set>
#include <utility>

#include "plan/latency/profile_fit.h"

namespace sb {
namespace {

constexpr int kTag = 11, kRepeats = 5;
constexpr int64_t kSmallest = int64_t{1} << 14;
constexpr double kLongestUs = 1e6;  // the sizes of a kind of link end with one that takes so long

using Samples = std::vector<std::pair<double, double>>;

class LinkMeasurement {
 public:
  LinkMeasurement(const LinkTarget& target, const std::vector<std::string>& hosts) : target_(target) {
    std::vector<std::string> names;
    for (const std::string& host : hosts) {
      const auto found = std::find(names.begin(), names.end(), host);
      node_of_.push_back(static_cast<int>(found - names.begin()));
      if (found == names.end()) {
        names.push_back(host);
        members_.emplace_back();
      }
      members_[static_cast<size_t>(node_of_.back())].push_back(static_cast<int>(node_of_.size()) - 1);
    }
    for (const std::vector<int>& node : members_) {
      fewest_ = std::min(fewest_, node.size());
      most_ = std::max(most_, node.size());
    }
  }

  Links run() {
    Links links;
    links.measured = true;
    links.node_ranks = static_cast<int>(most_);
    links.adapters = 1;
    if (most_ > 1) {
      links.transfer_inside = fitted(messages({{first_of_fullest(0), first_of_fullest(1)}}));
      const auto node = target_.data.split(own_node(), target_.data.rank(), "the ranks of a host");
      links.reduce_inside = fitted(collective(*node, true));
      links.gather_inside = fitted(collective(*node, false));
    }
    if (members_.size() > 1) {
      measure_between(links);
    }
    return links;
  }

 private:
  int own_node() const { return node_of_[static_cast<size_t>(target_.world.rank())]; }
  int first_of_fullest(size_t i) const {
    return std::ranges::max_element(members_, {}, &std::vector<int>::size)->at(i);
  }

  void measure_between(Links& links) {
    const auto pair = [&](size_t i) { return std::pair(members_[0][i], members_[1][i]); };
    const Samples alone = messages({pair(0)});
    links.transfer_between = fitted(alone);
    // As many messages at once as ranks can send: how many adapters carry them?
    std::vector<std::pair<int, int>> pairs;
    for (size_t i = 0; i < std::min(members_[0].size(), members_[1].size()); ++i) pairs.push_back(pair(i));
    if (pairs.size() > 1) {
      const Samples together = messages(pairs);
      const size_t last = std::min(alone.size(), together.size()) - 1;
      const double times = static_cast<double>(pairs.size()) * alone[last].second / together[last].second;
      links.adapters = std::clamp(static_cast<int>(std::lround(times)), 1, static_cast<int>(most_));
    }
    // What every adapter of a node carries of a collective of all.
    const double carried = static_cast<double>(fewest_) * links.adapter_share(static_cast<int>(most_));
    links.reduce_between = fitted(collective(target_.data, true));
    links.gather_between = fitted(collective(target_.data, false));
    links.reduce_between.us_per_byte *= carried;
    links.gather_between.us_per_byte *= carried;
  }

  // There and back, by halves.
  Samples messages(const std::vector<std::pair<int, int>>& pairs) {
    return series([&](int64_t bytes) {
      const int own = target_.data.rank();
      for (const auto& [first, second] : pairs) {
        if (own == first) {
          target_.data.send_async(target_.buffer, bytes, second, kTag).wait();
          target_.data.receive_async(target_.buffer, bytes, second, kTag).wait();
        } else if (own == second) {
          target_.data.receive_async(target_.buffer, bytes, first, kTag).wait();
          target_.data.send_async(target_.buffer, bytes, first, kTag).wait();
        }
      }
      return std::pair(static_cast<double>(bytes), 0.5);
    });
  }

  Samples collective(Communicator& group, bool reduce) {
    return series([&](int64_t bytes) {
      const int64_t count = bytes / 4 / group.size();
      if (reduce)
        group.reduce_scatter_async(target_.buffer, count, CommType::f32, ReduceOp::sum).wait();
      else
        group.all_gather_async(target_.buffer, count * 4, CommType::u8).wait();
      return std::pair(static_cast<double>(4 * count) * (group.size() - 1), 1.0);
    });
  }

  // (bytes, microseconds) of every size: the middle of some repeats, each as the slowest rank sees it. `one` gives the
  // bytes that count and the share of the time.
  template <typename One>
  Samples series(const One& one) {
    Samples samples;
    for (int64_t bytes = kSmallest; bytes <= target_.bytes; bytes *= 4) {
      std::vector<double> times;
      double counted = 0;
      for (int repeat = -1; repeat < kRepeats; ++repeat) {
        target_.world.barrier();
        const auto begin = std::chrono::steady_clock::now();
        const auto [own, share] = one(bytes);
        if (target_.finish) target_.finish();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        const double us = target_.world.all_reduce(share * took.count(), ReduceOp::max);
        counted = target_.world.all_reduce(own, ReduceOp::max);
        if (repeat >= 0) times.push_back(us);  // the first connects
        if (us > kLongestUs && repeat >= 0) break;
      }
      std::ranges::sort(times);
      samples.emplace_back(counted, times[times.size() / 2]);
      if (samples.back().second > kLongestUs) break;
    }
    return samples;
  }

  static Link fitted(const Samples& samples) {
    Link link = fit_link(samples);
    // Times that do not grow with the bytes say at least this much of them.
    if (link.us_per_byte <= 0) link.us_per_byte = samples.back().second / samples.back().first;
    return link;
  }

  const LinkTarget& target_;
  std::vector<int> node_of_;               // of every rank
  std::vector<std::vector<int>> members_;  // ranks of every node
  size_t fewest_ = 1 << 30, most_ = 0;
};

}  // namespace

Links measure_links(const LinkTarget& target, const std::vector<std::string>& hosts) {
  return LinkMeasurement(target, hosts).run();
}

}  // namespace sb
