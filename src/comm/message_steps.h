#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace sb {

// Where the steps of an operation put their messages; ranks are those of the group.
class MessagePoster {
 public:
  virtual ~MessagePoster() = default;
  // Of any size; large ones go in several.
  virtual void send(const void* data, int64_t bytes, int to) = 0;
  virtual void receive(void* data, int64_t bytes, int from) = 0;
};

// An operation as rounds of messages. next() is called when all messages of the round before are over: it posts the
// next round and gives true, or gives false when the operation is over.
class MessageSteps {
 public:
  virtual ~MessageSteps() = default;
  virtual bool next(MessagePoster& poster) = 0;
};

// Part `rank` of the data belongs to that rank.
struct RankPiece {
  char* data;
  int64_t count;  // elements
};
std::vector<RankPiece> equal_pieces(void* data, int64_t count_each, int ranks, CommType type);
// As equal as they can be, the first ones larger.
std::vector<RankPiece> divided_pieces(void* data, int64_t count_in_all, int ranks, CommType type);

std::unique_ptr<MessageSteps> send_steps(const void* data, int64_t bytes, int to);
std::unique_ptr<MessageSteps> receive_steps(void* data, int64_t bytes, int from);
std::unique_ptr<MessageSteps> barrier_steps(int rank, int ranks);
std::unique_ptr<MessageSteps> broadcast_steps(int rank, int ranks, void* data, int64_t bytes, int root);
std::unique_ptr<MessageSteps> all_gather_steps(int rank, std::vector<RankPiece> pieces, CommType type);
// Every rank gets its piece from all others and adds them in rank order: as many bytes as a ring would send, and the
// same bits whatever the network does. Works through the pieces in parts, so that the memory for what arrives stays
// bounded and adding goes on while the next part travels.
std::unique_ptr<MessageSteps> reduce_scatter_steps(int rank, std::vector<RankPiece> pieces, CommType type, ReduceOp op);
std::unique_ptr<MessageSteps> all_reduce_steps(int rank, int ranks, void* data, int64_t count, CommType type,
                                               ReduceOp op);

}  // namespace sb
