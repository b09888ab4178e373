#include "comm/device/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "core/errors.h"

namespace sb {

namespace {

// A communicator makes all its connections when it is made. By default the library makes those of an algorithm when an
// operation first uses it, which depends on sizes: memory would be taken in the middle of a step. (What the user has
// set stays.)
void connect_at_once() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0); });
}

}  // namespace

// Never closed: threads of the library may outlive what is done with it.
NcclLibrary::NcclLibrary(const std::filesystem::path& path) {
  connect_at_once();
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr)
    throw UserError(
        "NCCL does not load: {}. Install NCCL (libnccl2), put its folder into LD_LIBRARY_PATH, or set "
        "parallel.backend: "
        "staged to go through host memory",
        dlerror());
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(module, name));
    SB_USER_CHECK(function != nullptr, "{} has no {}: NCCL 2.18 or later is needed; or set parallel.backend: staged",
                  path.string(), name);
  };
  nccl::Result (*get_version)(int* version);
  find(get_version, "ncclGetVersion");
  get_version(&version_);
  SB_USER_CHECK(version_ >= 21800, "{} is version {}: NCCL 2.18 or later is needed; or set parallel.backend: staged",
                path.string(), version_);
  find(get_unique_id, "ncclGetUniqueId");
  find(comm_init_rank_config, "ncclCommInitRankConfig");
  find(comm_finalize, "ncclCommFinalize");
  find(comm_destroy, "ncclCommDestroy");
  find(comm_abort, "ncclCommAbort");
  find(comm_get_async_error, "ncclCommGetAsyncError");
  find(all_reduce, "ncclAllReduce");
  find(reduce_scatter, "ncclReduceScatter");
  find(all_gather, "ncclAllGather");
  find(broadcast, "ncclBroadcast");
  find(send, "ncclSend");
  find(receive, "ncclRecv");
  find(get_error_string_, "ncclGetErrorString");
  find(get_last_error_, "ncclGetLastError");
}

std::string NcclLibrary::message(nccl::Result result, nccl::Comm comm) const {
  const char* last = get_last_error_(comm);
  return fmt::format("NCCL: {}{}{}", get_error_string_(result), last != nullptr && *last != '\0' ? ": " : "",
                     last != nullptr ? last : "");
}

}  // namespace sb
