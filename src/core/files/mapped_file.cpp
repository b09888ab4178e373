#include "core/files/mapped_file.h"

#include <fmt/format.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {
namespace {

// What is mapped, for the handler of SIGBUS: a file that got shorter, or whose disk failed, shows when its memory is
// touched, and nobody can go on from there. A list that only grows, so that the handler may walk it at any time.
struct Mapping {
  std::atomic<const unsigned char*> begin = nullptr;  // null: free
  std::atomic<size_t> bytes = 0;
  char message[512];
  Mapping* next = nullptr;
};
std::atomic<Mapping*> mappings = nullptr;
std::mutex change_mappings;
struct sigaction before_us = {};

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const auto* at = static_cast<const unsigned char*>(info->si_addr);
  for (const Mapping* mapping = mappings.load(); mapping != nullptr; mapping = mapping->next) {
    const unsigned char* begin = mapping->begin.load();
    if (begin == nullptr || at < begin || at >= begin + mapping->bytes.load()) continue;
    constexpr int kUserErrorCode = 2;  // as main ends for an input at fault
    static_cast<void>(!::write(STDERR_FILENO, mapping->message, std::strlen(mapping->message)));
    ::_exit(kUserErrorCode);
  }
  // Not ours: as if there were no handler.
  if ((before_us.sa_flags & SA_SIGINFO) != 0) return before_us.sa_sigaction(signal, info, context);
  ::sigaction(SIGBUS, &before_us, nullptr);
}

void note_mapping(const unsigned char* begin, size_t bytes, const std::string& path) {
  const std::lock_guard lock(change_mappings);
  if (mappings.load() == nullptr) {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    ::sigaction(SIGBUS, &action, &before_us);
  }
  Mapping* mapping = mappings.load();
  while (mapping != nullptr && mapping->begin.load() != nullptr) mapping = mapping->next;
  const bool fresh = mapping == nullptr;
  if (fresh) {
    mapping = new Mapping;  // stays: the handler may be looking at it
    mapping->next = mappings.load();
  }
  const auto written = fmt::format_to_n(
      mapping->message, sizeof mapping->message - 1,
      "error: {}: was truncated while it was being read, or its disk failed; restore it and start again\n", path);
  mapping->message[std::min(written.size, sizeof mapping->message - 1)] = '\0';
  mapping->bytes = bytes;
  mapping->begin = begin;
  if (fresh) mappings = mapping;
}

void forget_mapping(const unsigned char* begin) {
  const std::lock_guard lock(change_mappings);
  for (Mapping* mapping = mappings.load(); mapping != nullptr; mapping = mapping->next)
    if (mapping->begin.load() == begin) mapping->begin = nullptr;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const RegularFile file(path);
  size_ = file.size();
  if (size_ == 0) return;
  void* memory = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (memory == MAP_FAILED) throw UnreadableFile(path, "cannot be mapped into memory", errno);
  data_ = static_cast<const unsigned char*>(memory);
  note_mapping(data_, static_cast<size_t>(size_), path);
}

MappedFile::~MappedFile() {
  if (!data_) return;
  forget_mapping(data_);
  ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace sb
