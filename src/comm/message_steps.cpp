#include "comm/message_steps.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "comm/reduce.h"

namespace sb {

std::vector<RankPiece> equal_pieces(void* data, int64_t count_each, int ranks, CommType type) {
  std::vector<RankPiece> pieces;
  for (int r = 0; r < ranks; ++r)
    pieces.push_back({static_cast<char*>(data) + r * count_each * comm_type_bytes(type), count_each});
  return pieces;
}

std::vector<RankPiece> divided_pieces(void* data, int64_t count_in_all, int ranks, CommType type) {
  std::vector<RankPiece> pieces;
  char* begin = static_cast<char*>(data);
  for (int r = 0; r < ranks; ++r) {
    const int64_t count = count_in_all / ranks + (r < count_in_all % ranks);
    pieces.push_back({begin, count});
    begin += count * comm_type_bytes(type);
  }
  return pieces;
}

namespace {

// Everything at once.
class OneRound final : public MessageSteps {
 public:
  explicit OneRound(std::function<void(MessagePoster&)> post) : post_(std::move(post)) {}
  bool next(MessagePoster& poster) override {
    if (!post_) return false;
    post_(poster);
    post_ = nullptr;
    return true;
  }

 private:
  std::function<void(MessagePoster&)> post_;
};

// In round k every rank hears, directly or not, from 2^(k+1) ranks.
class Barrier final : public MessageSteps {
 public:
  Barrier(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  bool next(MessagePoster& poster) override {
    if (distance_ >= ranks_) return false;
    poster.send(nullptr, 0, (rank_ + distance_) % ranks_);
    poster.receive(nullptr, 0, (rank_ + ranks_ - distance_) % ranks_);
    distance_ *= 2;
    return true;
  }

 private:
  const int rank_, ranks_;
  int distance_ = 1;
};

// A binomial tree: who has the data passes it on to half of the rest.
class Broadcast final : public MessageSteps {
 public:
  Broadcast(int rank, int ranks, void* data, int64_t bytes, int root)
      : place_((rank + ranks - root) % ranks), ranks_(ranks), root_(root), data_(data), bytes_(bytes) {}

  bool next(MessagePoster& poster) override {
    ++round_;
    int lowest = 1;  // bit of the place; the root has all above the largest
    while (lowest < ranks_ && !(place_ & lowest)) lowest *= 2;
    if (round_ == 1 && place_ != 0) {
      poster.receive(data_, bytes_, rank_at(place_ - lowest));
      return true;
    }
    if (round_ > (place_ != 0 ? 2 : 1)) return false;
    for (int bit = lowest / 2; bit >= 1; bit /= 2)
      if (place_ + bit < ranks_) poster.send(data_, bytes_, rank_at(place_ + bit));
    return true;
  }

 private:
  int rank_at(int place) const { return (place + root_) % ranks_; }

  const int place_, ranks_, root_;
  void* const data_;
  const int64_t bytes_;
  int round_ = 0;
};

class ReduceScatter final : public MessageSteps {
 public:
  ReduceScatter(int rank, std::vector<RankPiece> pieces, CommType type, ReduceOp op)
      : rank_(rank), pieces_(std::move(pieces)), type_(type), op_(op), element_(comm_type_bytes(type)) {
    for (const RankPiece& piece : pieces_) longest_ = std::max(longest_, piece.count);
    const auto others = static_cast<int64_t>(pieces_.size()) - 1;
    part_ = std::clamp<int64_t>((8 << 20) / std::max<int64_t>(others, 1), 32 << 10, 1 << 20) / element_;
    const int64_t kept = std::min(part_, pieces_[rank].count);
    for (std::vector<char>& arrived : arrived_) arrived.resize(others * kept * element_);
  }

  bool next(MessagePoster& poster) override {
    const int64_t begin = round_ * part_;
    const bool more = begin < longest_;
    if (more) {
      for (int step = 1; step < ranks(); ++step) {
        const int to = (rank_ + step) % ranks(), from = (rank_ + ranks() - step) % ranks();
        const int64_t outgoing = part_count(to, begin), incoming = part_count(rank_, begin);
        if (outgoing > 0) poster.send(pieces_[to].data + begin * element_, outgoing * element_, to);
        if (incoming > 0) poster.receive(arrived(round_, from), incoming * element_, from);
      }
    }
    if (round_ > 0) add(round_ - 1);
    ++round_;
    return more;
  }

 private:
  int ranks() const { return static_cast<int>(pieces_.size()); }
  int64_t part_count(int r, int64_t begin) const { return std::clamp<int64_t>(pieces_[r].count - begin, 0, part_); }
  char* arrived(int64_t round, int from) {
    const int64_t slot = from < rank_ ? from : from - 1;
    return arrived_[round % 2].data() + slot * std::min(part_, pieces_[rank_].count) * element_;
  }

  void add(int64_t round) {
    const int64_t begin = round * part_, count = part_count(rank_, begin);
    if (count == 0 || ranks() == 1) return;
    char* own = pieces_[rank_].data + begin * element_;
    char* sum = rank_ == 0 ? own : arrived(round, 0);
    for (int r = 1; r < ranks(); ++r) combine(sum, r == rank_ ? own : arrived(round, r), count, type_, op_);
    if (sum != own) std::memcpy(own, sum, count * element_);
  }

  const int rank_;
  const std::vector<RankPiece> pieces_;
  const CommType type_;
  const ReduceOp op_;
  const int64_t element_;
  int64_t longest_ = 0, part_ = 0, round_ = 0;
  std::vector<char> arrived_[2];  // of this round and the one being added
};

// For few elements: everybody gets everything at once and adds alone.
class SmallAllReduce final : public MessageSteps {
 public:
  SmallAllReduce(int rank, int ranks, void* data, int64_t count, CommType type, ReduceOp op)
      : rank_(rank), ranks_(ranks), data_(data), count_(count), type_(type), op_(op) {}

  bool next(MessagePoster& poster) override {
    const int64_t bytes = count_ * comm_type_bytes(type_);
    if (all_.empty() && bytes > 0) {
      all_.resize(ranks_ * bytes);
      std::memcpy(all_.data() + rank_ * bytes, data_, bytes);
      for (int step = 1; step < ranks_; ++step) {
        const int to = (rank_ + step) % ranks_, from = (rank_ + ranks_ - step) % ranks_;
        poster.send(data_, bytes, to);
        poster.receive(all_.data() + from * bytes, bytes, from);
      }
      return true;
    }
    for (int r = 1; r < ranks_ && bytes > 0; ++r) combine(all_.data(), all_.data() + r * bytes, count_, type_, op_);
    if (bytes > 0) std::memcpy(data_, all_.data(), bytes);
    return false;
  }

 private:
  const int rank_, ranks_;
  void* const data_;
  const int64_t count_;
  const CommType type_;
  const ReduceOp op_;
  std::vector<char> all_;
};

class Sequence final : public MessageSteps {
 public:
  Sequence(std::unique_ptr<MessageSteps> first, std::unique_ptr<MessageSteps> second)
      : first_(std::move(first)), second_(std::move(second)) {}
  bool next(MessagePoster& poster) override {
    if (first_ && first_->next(poster)) return true;
    first_.reset();
    return second_->next(poster);
  }

 private:
  std::unique_ptr<MessageSteps> first_, second_;
};

constexpr int64_t kSmallAllReduceBytes = 16 << 10;

}  // namespace

std::unique_ptr<MessageSteps> send_steps(const void* data, int64_t bytes, int to) {
  return std::make_unique<OneRound>([=](MessagePoster& poster) { poster.send(data, bytes, to); });
}

std::unique_ptr<MessageSteps> receive_steps(void* data, int64_t bytes, int from) {
  return std::make_unique<OneRound>([=](MessagePoster& poster) { poster.receive(data, bytes, from); });
}

std::unique_ptr<MessageSteps> barrier_steps(int rank, int ranks) {
  return std::make_unique<Barrier>(rank, ranks);
}

std::unique_ptr<MessageSteps> broadcast_steps(int rank, int ranks, void* data, int64_t bytes, int root) {
  return std::make_unique<Broadcast>(rank, ranks, data, bytes, root);
}

std::unique_ptr<MessageSteps> all_gather_steps(int rank, std::vector<RankPiece> pieces, CommType type) {
  return std::make_unique<OneRound>([=, pieces = std::move(pieces)](MessagePoster& poster) {
    const int ranks = static_cast<int>(pieces.size());
    for (int step = 1; step < ranks; ++step) {
      const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
      poster.send(pieces[rank].data, pieces[rank].count * comm_type_bytes(type), to);
      poster.receive(pieces[from].data, pieces[from].count * comm_type_bytes(type), from);
    }
  });
}

std::unique_ptr<MessageSteps> reduce_scatter_steps(int rank, std::vector<RankPiece> pieces, CommType type,
                                                   ReduceOp op) {
  return std::make_unique<ReduceScatter>(rank, std::move(pieces), type, op);
}

std::unique_ptr<MessageSteps> all_reduce_steps(int rank, int ranks, void* data, int64_t count, CommType type,
                                               ReduceOp op) {
  if (count * comm_type_bytes(type) <= kSmallAllReduceBytes)
    return std::make_unique<SmallAllReduce>(rank, ranks, data, count, type, op);
  const std::vector<RankPiece> pieces = divided_pieces(data, count, ranks, type);
  return std::make_unique<Sequence>(reduce_scatter_steps(rank, pieces, type, op), all_gather_steps(rank, pieces, type));
}

}  // namespace sb
