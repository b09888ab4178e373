// What talking between processes costs: starts itself on two ranks (or as many as the argument says) under mpirun, and
// measures latency, bandwidth, and how much of a reduction hides behind computation.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/world.h"

namespace {

using namespace sb;

double seconds_of(Communicator& world, const std::function<void()>& body) {
  double best = 1e300;
  for (int run = 0; run < 5; ++run) {
    world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    body();
    const double mine = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, world.all_reduce(mine, ReduceOp::max));
  }
  return best;
}

// About so many seconds of arithmetic that does not touch memory.
double compute(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  double x = 1;
  while (std::chrono::steady_clock::now() < end)
    for (int i = 0; i < 20000; ++i) x = x * 0.999999 + 1e-6;
  return x;
}

void measure(Communicator& world) {
  const auto print = [&](const std::string& text) {
    if (world.rank() == 0) fmt::print("{}\n", text);
  };
  constexpr int kCalls = 200;
  const double latency = seconds_of(world,
                                    [&] {
                                      for (int i = 0; i < kCalls; ++i) world.all_reduce(1.0f);
                                    }) /
                         kCalls;
  print(fmt::format("{} ranks: all_reduce of one number {:.0f} us", world.size(), latency * 1e6));

  const int64_t count = 16 << 20;
  std::vector<float> data(count, 1.0f), target(count);
  const double copy = seconds_of(world, [&] { std::memcpy(target.data(), data.data(), count * sizeof(float)); });
  const double reduce = seconds_of(world, [&] { world.all_reduce(std::span<float>(data)); });
  const double message = seconds_of(world, [&] {
    CommRequest in, out;
    const int next = (world.rank() + 1) % world.size(), last = (world.rank() + world.size() - 1) % world.size();
    in = world.receive_async(target.data(), count * 4, last, 0);
    out = world.send_async(data.data(), count * 4, next, 0);
    in.wait();
    out.wait();
  });
  const double mebibytes = static_cast<double>(count) * 4 / (1 << 20);
  print(fmt::format("64 MiB: memcpy {:.0f} MiB/s, ring of messages {:.0f} MiB/s, all_reduce {:.0f} MiB/s",
                    mebibytes / copy, mebibytes / message, mebibytes / reduce));

  // As long a computation as the reduction takes, on this core or (as with a GPU) elsewhere; hidden: how much of the
  // reduction disappears. Transfers within a machine are work of the same cores, so that little can hide behind a busy
  // one.
  for (const bool busy : {true, false}) {
    const auto work = [&] {
      if (busy)
        compute(reduce);
      else
        std::this_thread::sleep_for(std::chrono::duration<double>(reduce));
    };
    const double alone = seconds_of(world, work);
    const double together = seconds_of(world, [&] {
      CommRequest request = world.all_reduce_async(data.data(), count, CommType::f32, ReduceOp::sum);
      work();
      request.wait();
    });
    print(
        fmt::format("core {}: computation {:.0f} ms, all_reduce {:.0f} ms, both at once {:.0f} ms: hidden share {:.2f}",
                    busy ? "busy" : "idle", alone * 1e3, reduce * 1e3, together * 1e3,
                    (alone + reduce - together) / std::min(alone, reduce)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (launched_ranks() > 1) {
    const auto world = open_world_communicator();
    measure(*world);
    return 0;
  }
  return launch_local_ranks(argc > 1 ? std::stoi(argv[1]) : 2, {""}).exit_code;
}
