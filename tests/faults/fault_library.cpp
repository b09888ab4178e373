// A library to be preloaded (LD_PRELOAD) that makes one system call of a program fail, or ends the program there.
//
//   SB_FAULT=OPERATION:N:ACTION   the N-th call of the operation (from 1; N+ : that one and all later ones)
//     OPERATION  open read write rename fsync mmap flock fork thread
//     ACTION     the number of an error (errno), or kill
//   SB_FAULT_PATH=TEXT            only calls on files whose path has this in it are counted; fork and thread have none
//   SB_FAULT_COUNTS=FILE          at the end, "OPERATION CALLS" a line
//
// It takes the place of the C library's functions, so that calls inside that library (stdio's) are not seen.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Operation { kOpen, kRead, kWrite, kRename, kFsync, kMmap, kFlock, kFork, kThread, kOperations };
constexpr const char* kNames[kOperations] = {"open", "read",  "write", "rename", "fsync",
                                             "mmap", "flock", "fork",  "thread"};

struct Settings {
  int operation = -1;
  long number = 0;
  bool all_later = false, kills = false;
  int error = 0;
  const char* path = nullptr;
  const char* counts = nullptr;

  Settings() {
    path = std::getenv("SB_FAULT_PATH");
    counts = std::getenv("SB_FAULT_COUNTS");
    const char* fault = std::getenv("SB_FAULT");
    if (fault == nullptr) return;
    char name[16] = "", action[16] = "", later[2] = "";
    if (std::sscanf(fault, "%15[a-z]:%ld%1[+]:%15s", name, &number, later, action) == 4)
      all_later = true;
    else if (std::sscanf(fault, "%15[a-z]:%ld:%15s", name, &number, action) != 3)
      give_up(fault);
    for (int i = 0; i < kOperations; ++i)
      if (std::strcmp(name, kNames[i]) == 0) operation = i;
    kills = std::strcmp(action, "kill") == 0;
    error = std::atoi(action);
    if (operation < 0 || number < 1 || (!kills && error <= 0)) give_up(fault);
  }
  [[noreturn]] static void give_up(const char* fault) {
    std::fprintf(stderr, "SB_FAULT=%s: not OPERATION:N[+]:ERRNO or OPERATION:N[+]:kill\n", fault);
    _exit(99);
  }
};

const Settings& settings() {
  static const Settings one;
  return one;
}

std::atomic<long> calls[kOperations];

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool counts(const char* path) {
  if (settings().path == nullptr) return true;
  if (path == nullptr) return false;
  char whole[2 * PATH_MAX];
  if (path[0] != '/' && getcwd(whole, PATH_MAX) != nullptr) {
    const size_t folder = std::strlen(whole);
    std::snprintf(whole + folder, sizeof whole - folder, "/%s", path);
    path = whole;
  }
  return std::strstr(path, settings().path) != nullptr;
}

bool counts(int descriptor) {
  if (settings().path == nullptr) return true;
  char link[64], path[PATH_MAX + 1];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, PATH_MAX);
  if (length < 0) return false;
  path[length] = '\0';
  return counts(path);
}

// Whether this call is to fail; errno is set then.
bool fails(Operation operation) {
  const long number = ++calls[operation];
  const Settings& s = settings();
  if (s.operation != operation || (s.all_later ? number < s.number : number != s.number)) return false;
  if (s.kills) {
    kill(getpid(), SIGKILL);
    pause();
  }
  errno = s.error;
  return true;
}

__attribute__((destructor)) void write_counts() {
  if (settings().counts == nullptr) return;
  std::FILE* file = next<std::FILE* (*)(const char*, const char*)>("fopen")(settings().counts, "w");
  if (file == nullptr) return;
  for (int i = 0; i < kOperations; ++i) std::fprintf(file, "%s %ld\n", kNames[i], calls[i].load());
  std::fclose(file);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

extern "C" {

#define SB_OPEN(name)                                                         \
  int name(const char* path, int flags, ...) {                                \
    va_list arguments;                                                        \
    va_start(arguments, flags);                                               \
    const mode_t mode = mode_of(flags, arguments);                            \
    va_end(arguments);                                                        \
    if (counts(path) && fails(kOpen)) return -1;                              \
    return next<int (*)(const char*, int, mode_t)>(#name)(path, flags, mode); \
  }
SB_OPEN(open)
SB_OPEN(open64)

#define SB_OPENAT(name)                                                                    \
  int name(int folder, const char* path, int flags, ...) {                                 \
    va_list arguments;                                                                     \
    va_start(arguments, flags);                                                            \
    const mode_t mode = mode_of(flags, arguments);                                         \
    va_end(arguments);                                                                     \
    if (counts(path) && fails(kOpen)) return -1;                                           \
    return next<int (*)(int, const char*, int, mode_t)>(#name)(folder, path, flags, mode); \
  }
SB_OPENAT(openat)
SB_OPENAT(openat64)

#define SB_FOPEN(name)                                                        \
  std::FILE* name(const char* path, const char* mode) {                       \
    if (counts(path) && fails(kOpen)) return nullptr;                         \
    return next<std::FILE* (*)(const char*, const char*)>(#name)(path, mode); \
  }
SB_FOPEN(fopen)
SB_FOPEN(fopen64)

ssize_t read(int descriptor, void* to, size_t bytes) {
  if (counts(descriptor) && fails(kRead)) return -1;
  return next<ssize_t (*)(int, void*, size_t)>("read")(descriptor, to, bytes);
}

ssize_t write(int descriptor, const void* from, size_t bytes) {
  if (counts(descriptor) && fails(kWrite)) return -1;
  return next<ssize_t (*)(int, const void*, size_t)>("write")(descriptor, from, bytes);
}

ssize_t writev(int descriptor, const iovec* parts, int count) {
  if (counts(descriptor) && fails(kWrite)) return -1;
  return next<ssize_t (*)(int, const iovec*, int)>("writev")(descriptor, parts, count);
}

int rename(const char* from, const char* to) {
  if (counts(from) && fails(kRename)) return -1;
  return next<int (*)(const char*, const char*)>("rename")(from, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (counts(from) && fails(kRename)) return -1;
  return next<int (*)(int, const char*, int, const char*, unsigned)>("renameat2")(from_folder, from, to_folder, to,
                                                                                  flags);
}

int fsync(int descriptor) {
  if (counts(descriptor) && fails(kFsync)) return -1;
  return next<int (*)(int)>("fsync")(descriptor);
}

// Memory without a file is left alone: what happens there is the memory plan's business.
#define SB_MMAP(name)                                                                                            \
  void* name(void* at, size_t bytes, int protection, int flags, int descriptor, off_t offset) {                  \
    if (descriptor >= 0 && counts(descriptor) && fails(kMmap)) return MAP_FAILED;                                \
    return next<void* (*)(void*, size_t, int, int, int, off_t)>(#name)(at, bytes, protection, flags, descriptor, \
                                                                       offset);                                  \
  }
SB_MMAP(mmap)
SB_MMAP(mmap64)

int flock(int descriptor, int how) {
  if (counts(descriptor) && fails(kFlock)) return -1;
  return next<int (*)(int, int)>("flock")(descriptor, how);
}

pid_t fork() {
  if (fails(kFork)) return -1;
  return next<pid_t (*)()>("fork")();
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  if (fails(kThread)) return errno;
  return next<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create")(thread, attributes,
                                                                                                     body, argument);
}

}  // extern "C"
