#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/message_communicator.h"
#include "comm/transport.h"

namespace sb {

// A network inside the process, to run what lies above it under thread sanitizers and without a launcher.
struct MemoryNetwork {
  struct Letter {
    int rank;
    int64_t ticket;
    char* data;
    int64_t bytes;
    std::shared_ptr<std::vector<char>> copy = {};  // of an eager one
  };
  explicit MemoryNetwork(int ranks) : finished(ranks) {}
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<Letter>> sends, receives;
  std::vector<std::vector<Transport::Finished>> finished;  // a rank
  int64_t tickets = 0;
  int64_t eager = 0;  // messages up to so many bytes leave before anybody asks for them, as with MPI
};

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(MemoryNetwork& network, int rank) : network_(network), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(network_.finished.size()); }
  int64_t send(const void* data, int64_t bytes, int to, int tag) override {
    return post({rank_, to, tag}, true, static_cast<char*>(const_cast<void*>(data)), bytes);
  }
  int64_t receive(void* data, int64_t bytes, int from, int tag) override {
    return post({from, rank_, tag}, false, static_cast<char*>(data), bytes);
  }
  void poll(std::vector<Finished>& finished) override {
    std::lock_guard lock(network_.mutex);
    std::vector<Finished>& mine = network_.finished[rank_];
    finished.insert(finished.end(), mine.begin(), mine.end());
    mine.clear();
  }
  void close() override {}
  void abort(int) override {}

 private:
  int64_t post(const std::tuple<int, int, int>& channel, bool sends, char* data, int64_t bytes) {
    std::lock_guard lock(network_.mutex);
    MemoryNetwork::Letter mine{rank_, ++network_.tickets, data, bytes};
    auto& others = (sends ? network_.receives : network_.sends)[channel];
    if (others.empty()) {
      if (sends && bytes > 0 && bytes <= network_.eager) {
        mine.copy = std::make_shared<std::vector<char>>(data, data + bytes);
        mine.data = mine.copy->data();
        network_.finished[rank_].push_back({mine.ticket, 0, ""});
      }
      (sends ? network_.sends : network_.receives)[channel].push_back(mine);
      return mine.ticket;
    }
    const MemoryNetwork::Letter theirs = others.front();
    others.pop_front();
    const MemoryNetwork::Letter &from = sends ? mine : theirs, &to = sends ? theirs : mine;
    const bool fits = from.bytes <= to.bytes;
    if (fits && from.bytes > 0) std::memcpy(to.data, from.data, from.bytes);
    if (!from.copy) network_.finished[from.rank].push_back({from.ticket, 0, ""});
    network_.finished[to.rank].push_back({to.ticket, from.bytes, fits ? "" : "message truncated"});
    return mine.ticket;
  }

  MemoryNetwork& network_;
  const int rank_;
};

// Runs `body` on ranks that are threads here but know each other through the network only.
inline void run_message_ranks(int ranks, std::chrono::milliseconds timeout,
                              const std::function<void(Communicator& world)>& body, int64_t eager = 0) {
  MemoryNetwork network(ranks);
  network.eager = eager;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto world =
          make_message_communicator([&, r] { return std::make_unique<MemoryTransport>(network, r); }, timeout);
      body(*world);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sb
