#include "comm/peer_watch.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/log.h"

namespace sb {
namespace {

using std::chrono::milliseconds;

// A host that cannot be reached is given up 15 to 20 s after its last sign: long enough for a link that is down for ten
// seconds, as happens, and within the half minute that is promised.
constexpr int kQuietSeconds = 5, kProbeSeconds = 3, kProbes = 5;
constexpr milliseconds kTimeToConnect(2000), kTimeForAnotherWord(1500);
constexpr size_t kTokenBytes = 16, kMostAddresses = 8, kLongestMessage = 4096;

// Where a rank listens; sent as it is, between processes of one program.
struct Address {
  uint32_t addresses[kMostAddresses] = {};  // IPv4, in network order; 0: no more
  uint16_t port = 0;
  char token[kTokenBytes] = {};  // rank 0's counts
};

// Those of other hosts' interest first.
void find_addresses(Address& own) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return;
  size_t count = 0;
  for (const bool loopback : {false, true})
    for (const ifaddrs* one = all; one != nullptr && count < kMostAddresses; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_UP) == 0) continue;
      if (((one->ifa_flags & IFF_LOOPBACK) != 0) != loopback) continue;
      own.addresses[count++] = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr.s_addr;
    }
  freeifaddrs(all);
}

int listen_somewhere(uint16_t& port) {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = INADDR_ANY;
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (descriptor < 0 || bind(descriptor, generic, size) != 0 || listen(descriptor, 8) != 0 ||
      getsockname(descriptor, generic, &size) != 0) {
    if (descriptor >= 0) close(descriptor);
    return -1;
  }
  port = ntohs(address.sin_port);
  return descriptor;
}

void keep_alive(int descriptor) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(descriptor, level, option, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kQuietSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

bool ready(int descriptor, short what, milliseconds limit) {
  pollfd polled = {descriptor, what, 0};
  return poll(&polled, 1, static_cast<int>(limit.count())) == 1;
}

// All of it, in time; false otherwise.
bool read_all(int descriptor, char* data, size_t bytes, milliseconds limit) {
  while (bytes > 0) {
    if (!ready(descriptor, POLLIN, limit)) return false;
    const ssize_t got = recv(descriptor, data, bytes, MSG_DONTWAIT);
    if (got <= 0) return false;
    data += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool write_all(int descriptor, const std::string& text) {
  return send(descriptor, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == std::ssize(text);
}

// To the rank that listens there, which proves by the token that it is one of this run; -1: it cannot be reached.
int connect_to(const Address& address, const std::string& token) {
  for (const uint32_t one : address.addresses) {
    if (one == 0 || address.port == 0) break;
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (descriptor < 0) return -1;
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(address.port);
    to.sin_addr.s_addr = one;
    int error = 0;
    socklen_t size = sizeof error;
    std::string answer(kTokenBytes, '\0');
    if ((connect(descriptor, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0 || errno == EINPROGRESS) &&
        ready(descriptor, POLLOUT, kTimeToConnect) &&
        getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0 &&
        write_all(descriptor, token) && read_all(descriptor, answer.data(), answer.size(), kTimeToConnect) &&
        answer == token) {
      keep_alive(descriptor);
      return descriptor;
    }
    close(descriptor);
  }
  return -1;
}

std::string random_token() {
  std::random_device random;
  std::string token(kTokenBytes, '\0');
  for (char& byte : token) byte = static_cast<char>(random());
  return token;
}

// What is said on a connection: a letter, and with `e` the exit code and the reason up to the end of the line.
constexpr char kGoodBye = 'b', kEnd = 'e';

std::string end_message(const std::string& why, int exit_code) {
  std::string line = why.substr(0, kLongestMessage - 64);
  std::ranges::replace(line, '\n', '\r');
  return fmt::format("{}{} {}\n", kEnd, exit_code, line);
}

}  // namespace

PeerWatch::PeerWatch(Communicator& world, NameOf name_of, std::function<bool()> stopping, OnEnd on_end)
    : rank_(world.rank()),
      size_(world.size()),
      name_of_(std::move(name_of)),
      stopping_(std::move(stopping)),
      on_end_(std::move(on_end)) {
  std::vector<Address> addresses(static_cast<size_t>(size_));
  Address& own = addresses[static_cast<size_t>(rank_)];
  listening_ = listen_somewhere(own.port);
  find_addresses(own);
  if (rank_ == 0) std::ranges::copy(random_token(), own.token);
  world.all_gather_async(addresses.data(), sizeof(Address), CommType::u8).wait();
  token_.assign(addresses[0].token, kTokenBytes);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  SB_CHECK(wake_ >= 0, "eventfd: {}", std::strerror(errno));
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  const int next = connect_to(addresses[static_cast<size_t>(peer(kAfter))], token_);
  {
    std::lock_guard lock(mutex_);
    connections_[kAfter] = next;
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
  }
  // The first rank that stands alone, if any.
  const int alone = world.all_reduce(int32_t{next < 0 ? rank_ : size_}, ReduceOp::min);
  if (alone < size_ && rank_ == 0)
    log::warning(
        "{} cannot connect to {} by TCP (IPv4): does a firewall keep the hosts apart? Should a rank be lost, others "
        "may learn it by parallel.timeout only",
        name_of_(alone), name_of_((alone + 1) % size_));
}

PeerWatch::~PeerWatch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
  }
  thread_.join();
  for (const int descriptor : connections_)
    if (descriptor >= 0) {
      if (!ended_) write_all(descriptor, std::string(1, kGoodBye));
      close(descriptor);
    }
  if (listening_ >= 0) close(listening_);
  close(wake_);
}

int PeerWatch::peer(Side side) const {
  return (rank_ + (side == kAfter ? 1 : size_ - 1)) % size_;
}

void PeerWatch::announce(const std::string& why, int exit_code) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  ended_ = true;
  for (const Side side : {kBefore, kAfter}) tell(side, end_message(why, exit_code));
}

void PeerWatch::tell(Side side, const std::string& message) {
  if (connections_[side] >= 0) write_all(connections_[side], message);
}

void PeerWatch::end(const End& end) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true)) return;
    for (const Side side : {kBefore, kAfter}) tell(side, end_message(end.text, end.exit_code));
  }
  on_end_(end);
}

// The rank before this one, or somebody who has no business here.
void PeerWatch::accept_one() {
  const int descriptor = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) return;
  std::string token(kTokenBytes, '\0');
  if (!read_all(descriptor, token.data(), token.size(), milliseconds(500)) || token != token_ ||
      !write_all(descriptor, token_)) {
    close(descriptor);
    return;
  }
  keep_alive(descriptor);
  std::lock_guard lock(mutex_);
  connections_[kBefore] = descriptor;
  close(listening_);
  listening_ = -1;
}

void PeerWatch::lost(Side side, int error) {
  const bool closed = error == 0 || error == ECONNRESET || error == EPIPE;
  const std::string how =
      closed ? "ended without a word: it was killed, crashed, or had no memory left"
             : fmt::format("cannot be reached any more ({}): its host or the network is down", std::strerror(error));
  end({fmt::format("{} {}", name_of_(peer(side)), how), 1, peer(side), !closed});
}

void PeerWatch::hear(Side side) {
  char text[512];
  const ssize_t got = recv(connections_[side], text, sizeof text, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  const int error = got < 0 ? errno : 0;
  if (got > 0) {
    std::string& heard = heard_[side];
    heard.append(text, static_cast<size_t>(got));
    if (heard.front() == kEnd) {
      const size_t line_end = heard.find('\n');
      if (line_end == std::string::npos && heard.size() < kLongestMessage) return;
      const size_t space = heard.find(' ');
      std::string why = space == std::string::npos ? "" : heard.substr(space + 1, line_end - space - 1);
      std::ranges::replace(why, '\r', '\n');
      return end({why, std::clamp(std::atoi(heard.c_str() + 1), 1, 255)});
    }
  }
  {
    std::lock_guard lock(mutex_);
    close(std::exchange(connections_[side], -1));
  }
  if (got > 0) return;  // in peace
  if (side == kAfter && !stopping_()) return lost(side, error);
  if (!silence_) silence_ = {side, error, Clock::now() + kTimeForAnotherWord};
}

void PeerWatch::run() {
  for (;;) {
    pollfd polled[] = {{wake_, POLLIN, 0}, {-1, POLLIN, 0}, {-1, POLLIN, 0}, {-1, POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      polled[1].fd = listening_;
      if (!ended_)
        for (const Side side : {kBefore, kAfter}) polled[2 + side].fd = connections_[side];
    }
    int limit = -1;
    if (silence_)
      limit = static_cast<int>(
          std::max<int64_t>(0, std::chrono::ceil<milliseconds>(silence_->until - Clock::now()).count()));
    const int found = poll(polled, 4, limit);
    if (const auto silence = found == 0 ? std::exchange(silence_, std::nullopt) : std::nullopt)
      lost(silence->side, silence->error);
    if (found <= 0) continue;
    uint64_t count = 0;
    if (polled[0].revents != 0) (void)!read(wake_, &count, sizeof count);
    if (polled[1].revents != 0) accept_one();
    for (const Side side : {kBefore, kAfter})
      if (polled[2 + side].revents != 0) hear(side);
  }
}

}  // namespace sb
