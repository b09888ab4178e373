// The module sparsebalance_mpi.so: the only part that knows MPI.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "comm/transport.h"

namespace sb {
namespace {

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(std::string(what) + ": " + std::string(text, length));
}

class MpiTransport final : public Transport {
 public:
  MpiTransport() {
    int initialized = 0, provided = 0;
    MPI_Initialized(&initialized);
    if (initialized) throw std::runtime_error("MPI is in use already");
    // Between processes of a machine Open MPI keeps only three fragments of 32 KiB on their way, which is little when
    // nobody looks for some microseconds. What the user sets goes first.
    setenv("OMPI_MCA_pml_ob1_send_pipeline_depth", "64", 0);
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_FUNNELED) throw std::runtime_error("this MPI was built without threads");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    void* upper = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &upper, &found), "MPI_TAG_UB");
    if (!found || *static_cast<int*>(upper) < kLargestTag) throw std::runtime_error("this MPI has too few tags");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  int64_t send(const void* data, int64_t bytes, int to, int tag) override {
    MPI_Request request;
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, MPI_COMM_WORLD, &request), "MPI_Isend");
    return add(request);
  }
  int64_t receive(void* data, int64_t bytes, int from, int tag) override {
    MPI_Request request;
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, MPI_COMM_WORLD, &request), "MPI_Irecv");
    return add(request);
  }

  void poll(std::vector<Finished>& finished) override {
    if (requests_.empty()) return;
    int count = 0;
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    const int code =
        MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
    if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
    if (count == MPI_UNDEFINED || count == 0) return;
    for (int i = 0; i < count; ++i) {
      Finished one{tickets_[indices_[i]], 0, ""};
      const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
      if (error != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING];
        int length = 0;
        MPI_Error_string(error, text, &length);
        one.error.assign(text, length);
      }
      int bytes = 0;
      MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
      one.bytes = bytes;
      finished.push_back(std::move(one));
    }
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i)
      if (requests_[i] != MPI_REQUEST_NULL) {
        requests_[kept] = requests_[i];
        tickets_[kept++] = tickets_[i];
      }
    requests_.resize(kept);
    tickets_.resize(kept);
  }

  void close() override { check(MPI_Finalize(), "MPI_Finalize"); }
  void abort(int exit_code) override { MPI_Abort(MPI_COMM_WORLD, exit_code); }

 private:
  int64_t add(MPI_Request request) {
    requests_.push_back(request);
    tickets_.push_back(++ticket_);
    return ticket_;
  }

  int rank_ = 0, size_ = 0;
  int64_t ticket_ = 0;
  std::vector<MPI_Request> requests_;
  std::vector<int64_t> tickets_;  // of the requests
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace
}  // namespace sb

extern "C" bool sparsebalance_transport_is_open_mpi() {
#ifdef OPEN_MPI
  return true;
#else
  return false;
#endif
}

extern "C" sb::Transport* sparsebalance_open_transport(char* error, int64_t error_size) {
  try {
    return std::make_unique<sb::MpiTransport>().release();
  } catch (const std::exception& failure) {
    std::snprintf(error, static_cast<size_t>(error_size), "%s", failure.what());
    return nullptr;
  }
}
