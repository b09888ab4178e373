#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace sb {

// Two processes with the ends of a socket: ranks of their own where there is no MPI. Messages leave at once and wait
// with the receiver until they are asked for.
class SocketTransport final : public Transport {
 public:
  SocketTransport(int socket, int rank) : socket_(socket), rank_(rank) {
    fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
  }
  ~SocketTransport() override { ::close(socket_); }
  SocketTransport(const SocketTransport&) = delete;
  SocketTransport& operator=(const SocketTransport&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return 2; }

  int64_t send(const void* data, int64_t bytes, int to, int tag) override {
    const char* begin = static_cast<const char*>(data);
    if (to == rank_) {
      deliver(rank_, tag, {begin, static_cast<size_t>(bytes)});
    } else {
      const Header header{tag, bytes};
      out_.append(reinterpret_cast<const char*>(&header), sizeof header);
      out_.append(begin, static_cast<size_t>(bytes));
    }
    finished_.push_back({++tickets_, 0, ""});
    return tickets_;
  }
  int64_t receive(void* data, int64_t bytes, int from, int tag) override {
    Box& box = boxes_[{from, tag}];
    box.wanted.push_back({++tickets_, static_cast<char*>(data), bytes});
    match(box);
    return tickets_;
  }
  void poll(std::vector<Finished>& finished) override {
    write_out();
    read_in();
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    finished_.clear();
  }
  void close() override {
    for (; !out_.empty() && !gone_; wait(POLLOUT)) write_out();
    shutdown(socket_, SHUT_WR);
    for (; !gone_; wait(POLLIN)) read_in();
  }
  void abort(int exit_code) override { _exit(exit_code); }

 private:
  struct Header {
    int64_t tag, bytes;
  };
  struct Wanted {
    int64_t ticket;
    char* data;
    int64_t bytes;
  };
  struct Box {
    std::deque<Wanted> wanted;
    std::deque<std::string> arrived;
  };

  void wait(short events) const {
    pollfd polled{socket_, events, 0};
    ::poll(&polled, 1, 100);
  }
  void deliver(int from, int tag, std::string message) {
    Box& box = boxes_[{from, tag}];
    box.arrived.push_back(std::move(message));
    match(box);
  }
  void match(Box& box) {
    for (; !box.wanted.empty() && !box.arrived.empty(); box.wanted.pop_front(), box.arrived.pop_front()) {
      const Wanted& wanted = box.wanted.front();
      const std::string& message = box.arrived.front();
      const auto bytes = static_cast<int64_t>(message.size());
      const bool fits = bytes <= wanted.bytes;
      if (fits && bytes > 0) std::memcpy(wanted.data, message.data(), message.size());
      finished_.push_back({wanted.ticket, bytes, fits ? "" : "message truncated"});
    }
  }
  void write_out() {
    while (!out_.empty()) {
      const ssize_t count = ::send(socket_, out_.data(), out_.size(), MSG_NOSIGNAL);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (count < 0) return lose();
      out_.erase(0, static_cast<size_t>(count));
    }
  }
  void read_in() {
    char bytes[1 << 16];
    while (!gone_) {
      const ssize_t count = ::recv(socket_, bytes, sizeof bytes, 0);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (count <= 0) return lose();
      in_.append(bytes, static_cast<size_t>(count));
    }
    size_t begin = 0;
    for (Header header{}; in_.size() - begin >= sizeof header;) {
      std::memcpy(&header, in_.data() + begin, sizeof header);
      const size_t end = begin + sizeof header + static_cast<size_t>(header.bytes);
      if (in_.size() < end) break;
      deliver(1 - rank_, static_cast<int>(header.tag), in_.substr(begin + sizeof header, end - begin - sizeof header));
      begin = end;
    }
    in_.erase(0, begin);
  }
  // What still waits for the other process will never come.
  void lose() {
    gone_ = true;
    for (auto& [from, box] : boxes_)
      if (from.first != rank_)
        for (; !box.wanted.empty(); box.wanted.pop_front())
          finished_.push_back({box.wanted.front().ticket, 0, "the other process has ended"});
  }

  const int socket_, rank_;
  bool gone_ = false;
  int64_t tickets_ = 0;
  std::string in_, out_;
  std::map<std::pair<int, int>, Box> boxes_;  // by sender and tag
  std::vector<Finished> finished_;
};

}  // namespace sb
