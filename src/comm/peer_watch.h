#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/communicator.h"

namespace sb {

// Tells a process of a run that another one is gone, whatever started them. The ranks stand in a ring, and each holds
// a TCP connection to the next one over which nothing travels: the system closes it when the process at the other end
// dies, and its keepalive finds out within half a minute that a host cannot be reached. Launchers know that too, but
// not all of them say so.
class PeerWatch {
 public:
  // Why the job ends, as every rank learns it.
  struct End {
    std::string text;
    int exit_code = 1;
    int lost_rank = -1;    // of the world, where one was lost and this rank is the one that says so
    bool at_once = false;  // it was lost a while ago: the launcher had its time to end the others
  };
  // Called once, by the watching thread.
  using OnEnd = std::function<void(const End&)>;
  using NameOf = std::function<std::string(int rank)>;  // of the world, for messages

  // Collective. Ranks that cannot connect go without, with a warning of rank 0's. `stopping`: this process was asked to
  // stop, as a launcher does with all before it kills them: who ends then is not the one to blame, unless time passes.
  PeerWatch(Communicator& world, NameOf name_of, std::function<bool()> stopping, OnEnd on_end);
  // Says good-bye, so that nobody takes this rank for lost.
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // This rank ends the job: the others learn why from it, before they see it go.
  void announce(const std::string& why, int exit_code);

 private:
  using Clock = std::chrono::steady_clock;
  enum Side { kBefore, kAfter, kSides };  // the rank before this one in the ring, which connects to it, and the next

  void run();
  void accept_one();
  void hear(Side side);
  void lost(Side side, int error);
  void tell(Side side, const std::string& message);
  void end(const End& end);
  int peer(Side side) const;

  const int rank_, size_;
  const NameOf name_of_;
  const std::function<bool()> stopping_;
  const OnEnd on_end_;
  std::string token_;
  std::mutex mutex_;  // the connections, for those who write
  int listening_ = -1, wake_ = -1;
  int connections_[kSides] = {-1, -1};
  std::string heard_[kSides];
  // One that is gone, but for others to name: the rank before this one by the rank before that.
  struct Silence {
    Side side;
    int error;
    Clock::time_point until;
  };
  std::optional<Silence> silence_;
  bool ended_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace sb
