#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace sb::gpu {

// Plans of the micro-batches seen last, so that layers and steps that are alike share one. States hold on to the plans
// they need.
template <typename Plan>
class RecentPlans {
 public:
  static constexpr size_t kMost = 64;  // kept, unless more states are told of
  explicit RecentPlans(size_t most = kMost) : most_(most) {}

  // Those that so many states keep, each one of its own, and some for micro-batches that come again.
  static size_t for_states(size_t states) { return states + 8; }
  // So many more states will need plans of their own, none of more than so many bytes of the device: all get their
  // memory now.
  void reserve(size_t states, int64_t bytes) {
    states_ += states;
    bytes_ = std::max(bytes_, bytes);
    most_ = for_states(states_);
    plans_.clear();  // states keep those they use
    while (plans_.size() < most_) {
      auto plan = std::make_shared<Plan>();
      plan->reserve(bytes_);
      put(std::move(plan));
    }
  }

  // The plan of such a request, from now on the one used last; null where there is none.
  template <typename Request>
  std::shared_ptr<Plan> find(const Request& request) {
    const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& p) { return p->matches(request); });
    if (found == plans_.end()) return nullptr;
    std::rotate(plans_.begin(), found, std::next(found));
    return plans_.front();
  }

  // A plan to be built and put: where there are as many as are kept, the oldest one that no state needs gives its
  // memory.
  std::shared_ptr<Plan> take() {
    std::shared_ptr<Plan> plan;
    if (plans_.size() >= most_) {
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

  size_t size() const { return plans_.size(); }

 private:
  size_t most_, states_ = 0;
  int64_t bytes_ = 0;
  std::vector<std::shared_ptr<Plan>> plans_;  // used last first
};

}  // namespace sb::gpu
