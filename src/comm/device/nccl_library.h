#pragma once

#include <climits>
#include <cstddef>
#include <filesystem>
#include <string>

namespace sb {

// The part of NCCL's C interface that is used, declared here so that nothing is needed to build. All of it has been
// stable since 2.18.
namespace nccl {

using Comm = void*;
struct UniqueId {
  char bytes[128] = {};
};
enum Result : int { kSuccess = 0, kInProgress = 7 };
enum DataType : int { kUint8 = 1, kInt32 = 2, kInt64 = 4, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9 };
enum RedOp : int { kSum = 0, kMax = 2, kMin = 3 };
// The beginning of the structure; its size says how much of it there is.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN, cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN, traffic_class = INT_MIN;
};

}  // namespace nccl

// libnccl, loaded at run time. UserError when it is missing or too old.
class NcclLibrary {
 public:
  explicit NcclLibrary(const std::filesystem::path& path);
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  int version() const { return version_; }
  // What a result means, with what the library has to say about it.
  std::string message(nccl::Result result, nccl::Comm comm) const;

  nccl::Result (*get_unique_id)(nccl::UniqueId* id);
  nccl::Result (*comm_init_rank_config)(nccl::Comm* comm, int ranks, nccl::UniqueId id, int rank, nccl::Config* config);
  nccl::Result (*comm_finalize)(nccl::Comm comm);
  nccl::Result (*comm_destroy)(nccl::Comm comm);
  nccl::Result (*comm_abort)(nccl::Comm comm);
  nccl::Result (*comm_get_async_error)(nccl::Comm comm, nccl::Result* error);
  nccl::Result (*all_reduce)(const void* from, void* to, size_t count, nccl::DataType type, nccl::RedOp op,
                             nccl::Comm comm, void* stream);
  nccl::Result (*reduce_scatter)(const void* from, void* to, size_t count, nccl::DataType type, nccl::RedOp op,
                                 nccl::Comm comm, void* stream);
  nccl::Result (*all_gather)(const void* from, void* to, size_t count, nccl::DataType type, nccl::Comm comm,
                             void* stream);
  nccl::Result (*broadcast)(const void* from, void* to, size_t count, nccl::DataType type, int root, nccl::Comm comm,
                            void* stream);
  nccl::Result (*send)(const void* from, size_t count, nccl::DataType type, int peer, nccl::Comm comm, void* stream);
  nccl::Result (*receive)(void* to, size_t count, nccl::DataType type, int peer, nccl::Comm comm, void* stream);

 private:
  const char* (*get_error_string_)(nccl::Result result);
  const char* (*get_last_error_)(nccl::Comm comm);
  int version_ = 0;
};

}  // namespace sb
