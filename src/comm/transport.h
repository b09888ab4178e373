#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

// Messages between processes, as little of a library as the collectives need, so that the program itself links none:
// the MPI implementation is a module of its own that is loaded when a launcher started several ranks. One thread calls
// everything, from opening to closing; nothing here waits, except close(). Failures are std::runtime_error, a type both
// sides of the module's border share.
class Transport {
 public:
  // Larger ones go in several: libraries count bytes in 32 bits, and the ends of parts show that data is moving.
  static constexpr int64_t kLargestMessage = int64_t{1} << 20;
  static constexpr int kLargestTag = (1 << 28) - 1;

  struct Finished {
    int64_t ticket;
    int64_t bytes;      // received
    std::string error;  // empty: it went well
  };

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Begin, and give a ticket. Messages with the same sender, receiver and tag arrive in the order they were sent.
  virtual int64_t send(const void* data, int64_t bytes, int to, int tag) = 0;
  virtual int64_t receive(void* data, int64_t bytes, int from, int tag) = 0;
  // Moves everything on and appends what is over.
  virtual void poll(std::vector<Finished>& finished) = 0;
  // Waits until all ranks close.
  virtual void close() = 0;
  // Ends the job on all ranks; may return before this process ends.
  virtual void abort(int exit_code) = 0;
};

// What a module exports under kTransportEntry. Gives nothing and fills `error` when it cannot.
using OpenTransport = Transport* (*)(char* error, int64_t error_size);
inline constexpr const char* kTransportEntry = "sparsebalance_open_transport";
// And under kTransportIsOpenMpi: whether its library is Open MPI, whose ranks find each other by PMIx alone.
using TransportIsOpenMpi = bool (*)();
inline constexpr const char* kTransportIsOpenMpi = "sparsebalance_transport_is_open_mpi";

}  // namespace sb
