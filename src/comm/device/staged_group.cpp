#include "comm/device/staged_group.h"

#include <algorithm>
#include <cstring>

#include "comm/reduce.h"
#include "device/cuda.h"

namespace sb {
namespace {

using Kind = DeviceOperation::Kind;

constexpr size_t kPiecesUnderWay = 2;
constexpr int64_t kLargestElement = 8;  // bytes
constexpr int kPieceEvents = 32;        // made at the start: two for each piece that is under way

char* at(void* data, int64_t bytes) {
  return static_cast<char*>(data) + bytes;
}

// Whether the buffer has a part for every rank.
bool in_parts(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_gather;
}

}  // namespace

StagedCopies::StagedCopies(DeviceKind device, int64_t piece_bytes)
    : device_(device), piece_bytes_(piece_bytes), events_(device, kPieceEvents) {
  SB_CHECK(piece_bytes > 0, "pieces of {} bytes", piece_bytes);
}

void StagedCopies::copy(const Exec& queue, const void* from, void* to, int64_t bytes) const {
  if (bytes == 0) return;
  if (device_ == DeviceKind::cuda)
    cuda::copy(queue.stream, from, to, bytes);
  else
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

StagedGroup::~StagedGroup() = default;

StagedGroup::Line::Line(DeviceKind device) {
  out.device = in.device = device;
  if (device == DeviceKind::cpu) return;
  out_stream = cuda::make_stream();
  in_stream = cuda::make_stream();
  out.stream = out_stream.get();
  in.stream = in_stream.get();
}

int64_t StagedGroup::element_bytes(const DeviceOperation& operation) const {
  return comm_type_bytes(operation.type) * (in_parts(operation.kind) ? host_->size() : 1);
}

int64_t StagedGroup::piece_elements(const DeviceOperation& operation) const {
  return std::max<int64_t>(1, copies_->piece_bytes() / element_bytes(operation));
}

void StagedGroup::begin(std::shared_ptr<DeviceOperation> operation) {
  const Key key =
      operation->message() ? Key{operation->kind, operation->peer, operation->tag} : Key{Kind::barrier, 0, 0};
  lines_.try_emplace(key, copies_->device()).first->second.operations.push_back(std::move(operation));
}

bool StagedGroup::idle() const {
  return std::all_of(lines_.begin(), lines_.end(),
                     [](const auto& entry) { return entry.second.operations.empty() && entry.second.pieces.empty(); });
}

bool StagedGroup::advance(const Queued& queued) {
  bool moved = false;
  for (auto& [key, line] : lines_) moved = advance(line, queued) || moved;
  return moved;
}

void StagedGroup::drop() {
  for (auto& [key, line] : lines_)
    for (Piece& piece : line.pieces) piece.request.abandon();
  if (copies_->device() == DeviceKind::cuda)
    for (const auto& [key, line] : lines_)
      for (const Exec* queue : {&line.out, &line.in}) cuda::synchronize(queue->stream);
  lines_.clear();
}

// No piece is longer than one of `piece_bytes`, or than a single element of every rank.
HostMemory StagedGroup::take_buffer(Line& line) const {
  if (!line.has_buffers) {
    const int64_t bytes = std::max(copies_->piece_bytes(), kLargestElement * host_->size());
    for (size_t i = 0; i < kPiecesUnderWay; ++i) line.free.emplace_back(bytes, copies_->device());
    line.has_buffers = true;
  }
  HostMemory buffer = std::move(line.free.back());
  line.free.pop_back();
  return buffer;
}

// An operation without data is one empty piece.
bool StagedGroup::cut_piece(Line& line) {
  if (line.operations.empty() || line.pieces.size() >= kPiecesUnderWay) return false;
  const std::shared_ptr<DeviceOperation> operation = line.operations.front();
  Piece& piece = line.pieces.emplace_back(copies_->events());
  piece.operation = operation;
  piece.begin = line.cut;
  piece.count = std::min(operation->count - line.cut, piece_elements(*operation));
  line.cut += piece.count;
  piece.last = line.cut == operation->count;
  if (piece.last) {
    line.operations.pop_front();
    line.cut = 0;
  }
  if (piece.count > 0) piece.buffer = take_buffer(line);
  fetch(line, piece);
  return true;
}

void StagedGroup::fetch(const Line& line, Piece& piece) const {
  const DeviceOperation& operation = *piece.operation;
  const int64_t element = comm_type_bytes(operation.type), bytes = piece.count * element;
  const int64_t begin = piece.begin * element, part = operation.count * element;
  void* buffer = piece.buffer.data();
  const Exec& out = line.out;
  if (operation.kind == Kind::receive || (operation.kind == Kind::broadcast && operation.peer != host_->rank())) return;
  operation.ready.hold(out);
  if (operation.kind == Kind::barrier) {
    // Nothing is copied: the stream itself has come so far.
  } else if (operation.kind == Kind::reduce_scatter) {
    for (int r = 0; r < host_->size(); ++r)
      copies_->copy(out, at(operation.data, r * part + begin), at(buffer, r * bytes), bytes);
  } else if (operation.kind == Kind::all_gather) {
    copies_->copy(out, at(operation.data, host_->rank() * part + begin), at(buffer, host_->rank() * bytes), bytes);
  } else {
    copies_->copy(out, at(operation.data, begin), buffer, bytes);
  }
  piece.fetched.record(out);
}

bool StagedGroup::may_exchange(const Line& line, const Piece& piece) const {
  if (!piece.fetched.passed()) return false;
  if (piece.operation->kind != Kind::barrier) return true;
  // What came before in the line is over, and what somebody has waited for in others.
  if (&piece != &line.pieces.front()) return false;
  for (const auto& [key, other] : lines_)
    for (const Piece& one : other.pieces)
      if (one.state == Piece::State::storing && !one.stored.passed()) return false;
  return true;
}

CommRequest StagedGroup::exchange(const Piece& piece) {
  const DeviceOperation& operation = *piece.operation;
  void* buffer = piece.buffer.data();
  switch (operation.kind) {
    case Kind::all_reduce:
      return host_->all_reduce_async(buffer, piece.count, operation.type, operation.op);
    case Kind::reduce_scatter:
      return host_->reduce_scatter_async(buffer, piece.count, operation.type, operation.op);
    case Kind::all_gather:
      return host_->all_gather_async(buffer, piece.count, operation.type);
    case Kind::broadcast:
      return host_->broadcast_async(buffer, piece.count, operation.type, operation.peer);
    case Kind::send:
      return host_->send_async(buffer, piece.count, operation.peer, operation.tag);
    case Kind::receive:
      return host_->receive_async(buffer, piece.count, operation.peer, operation.tag);
    case Kind::barrier:
      return host_->barrier_async();
  }
  throw InternalError("no operation {}", static_cast<int>(operation.kind));
}

void StagedGroup::store(const Line& line, Piece& piece) const {
  const DeviceOperation& operation = *piece.operation;
  const int64_t element = comm_type_bytes(operation.type), bytes = piece.count * element;
  const int64_t begin = piece.begin * element, part = operation.count * element;
  void* buffer = piece.buffer.data();
  const Exec& in = line.in;
  operation.ready.hold(in);
  if (operation.kind == Kind::reduce_scatter) {
    copies_->copy(in, at(buffer, host_->rank() * bytes), at(operation.data, host_->rank() * part + begin), bytes);
  } else if (operation.kind == Kind::all_gather) {
    for (int r = 0; r < host_->size(); ++r)
      if (r != host_->rank()) copies_->copy(in, at(buffer, r * bytes), at(operation.data, r * part + begin), bytes);
  } else if (operation.kind != Kind::send && operation.kind != Kind::barrier &&
             !(operation.kind == Kind::broadcast && operation.peer == host_->rank())) {
    copies_->copy(in, buffer, at(operation.data, begin), bytes);
  }
  piece.stored.record(in);
  if (piece.last) piece.operation->over.record(in);
}

bool StagedGroup::advance(Line& line, const Queued& queued) {
  bool moved = cut_piece(line);
  // Pieces are exchanged in order, as the other ranks' are, and stored in order: with the last one all are there.
  bool earlier_exchanging = true, earlier_stored = true;
  for (Piece& piece : line.pieces) {
    if (piece.state == Piece::State::fetching && earlier_exchanging && may_exchange(line, piece)) {
      piece.request = exchange(piece);
      piece.exchange_begun = Clock::now();
      piece.state = Piece::State::exchanging;
      moved = true;
    }
    if (piece.state == Piece::State::exchanging) {
      // Asked of every piece: asking may be what moves it on.
      if (const bool done = piece.request.done(); done && earlier_stored) {
        piece.request.wait();
        store(line, piece);
        piece.state = Piece::State::storing;
        if (piece.last) queued(*piece.operation);
        moved = true;
      } else if (!done) {
        check_time(line, piece);
      }
    }
    earlier_exchanging = piece.state != Piece::State::fetching;
    earlier_stored = piece.state == Piece::State::storing;
  }
  while (!line.pieces.empty() && line.pieces.front().state == Piece::State::storing &&
         line.pieces.front().stored.passed()) {
    if (line.pieces.front().count > 0) line.free.push_back(std::move(line.pieces.front().buffer));
    line.pieces.pop_front();
    moved = true;
  }
  return moved;
}

// Whoever waits for a later operation of the line waits for this one, too.
void StagedGroup::check_time(const Line& line, const Piece& piece) const {
  const auto check = [&](const DeviceOperation& operation) {
    if (waited_for(operation, piece.exchange_begun) >= host_->timeout())
      throw_timeout(host_->rank(), host_->timeout(), *piece.operation);
  };
  for (const Piece& other : line.pieces) check(*other.operation);
  for (const auto& operation : line.operations) check(*operation);
}

}  // namespace sb
