#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace sb::gpu {

// Plans of the micro-batches seen last, so that layers and steps that are alike share one. States hold on to the plans
// they need.
template <typename Plan>
class RecentPlans {
 public:
  // The plan of such a request, from now on the one used last; null where there is none.
  template <typename Request>
  std::shared_ptr<Plan> find(const Request& request) {
    const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& p) { return p->matches(request); });
    if (found == plans_.end()) return nullptr;
    std::rotate(plans_.begin(), found, std::next(found));
    return plans_.front();
  }

  // A plan to be built and put: where there are `most`, the oldest one that no state needs gives its memory.
  std::shared_ptr<Plan> take(size_t most) {
    std::shared_ptr<Plan> plan;
    if (plans_.size() >= most) {
      const auto free = std::find_if(plans_.rbegin(), plans_.rend(), [](const auto& p) { return p.use_count() == 1; });
      if (free != plans_.rend()) {
        plan = *free;
        plans_.erase(std::next(free).base());
      } else {
        plans_.pop_back();
      }
    }
    return plan ? plan : std::make_shared<Plan>();
  }
  void put(std::shared_ptr<Plan> plan) { plans_.insert(plans_.begin(), std::move(plan)); }

  void clear() { plans_.clear(); }
  size_t size() const { return plans_.size(); }

 private:
  std::vector<std::shared_ptr<Plan>> plans_;  // used last first
};

}  // namespace sb::gpu
