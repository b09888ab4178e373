// Loaded before a program (LD_PRELOAD), lets no process write more than SB_WRITE_RATE bytes a second to files: a host
// whose disk or file system is that slow.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

extern "C" ssize_t write(int descriptor, const void* data, size_t bytes) {
  using Write = ssize_t (*)(int, const void*, size_t);
  static const auto real = reinterpret_cast<Write>(dlsym(RTLD_NEXT, "write"));
  static const char* const rate = std::getenv("SB_WRITE_RATE");
  const ssize_t written = real(descriptor, data, bytes);
  struct stat file = {};
  if (rate != nullptr && written > 4096 && fstat(descriptor, &file) == 0 && S_ISREG(file.st_mode)) {
    const double seconds = static_cast<double>(written) / std::atof(rate);
    timespec pause = {static_cast<time_t>(seconds), 0};
    pause.tv_nsec = static_cast<long>(1e9 * (seconds - static_cast<double>(pause.tv_sec)));
    nanosleep(&pause, nullptr);
  }
  return written;
}
