// What the engine says: where a mistake was made, who waits for whom, what kernels took.

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "softgpu/engine/state.h"
#include "softgpu/engine/statistics.h"
#include "softgpu/interface/device.h"

namespace softgpu {
namespace {

// Names of the functions of this program by address, from its own symbol table: kernels are in no other.
class SymbolTable {
 public:
  SymbolTable() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    if (bytes_.size() < sizeof(Elf64_Ehdr)) return;
    const auto* header = at<Elf64_Ehdr>(0);
    for (int i = 0; i < header->e_shnum; ++i) {
      const auto* section = at<Elf64_Shdr>(header->e_shoff + static_cast<size_t>(i) * sizeof(Elf64_Shdr));
      if (section->sh_type != SHT_SYMTAB) continue;
      const auto* names = at<Elf64_Shdr>(header->e_shoff + section->sh_link * sizeof(Elf64_Shdr));
      for (size_t s = 0; s < section->sh_size; s += sizeof(Elf64_Sym)) {
        const auto* symbol = at<Elf64_Sym>(section->sh_offset + s);
        if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || symbol->st_value == 0) continue;
        const char* name = at<char>(names->sh_offset + symbol->st_name);
        names_.emplace(symbol->st_value, name);
        if (std::strcmp(name, "softgpu_switch") == 0)
          loaded_ = reinterpret_cast<uintptr_t>(&softgpu_switch) - symbol->st_value;
      }
    }
  }

  std::string name(const void* function) const {
    const auto found = names_.find(reinterpret_cast<uintptr_t>(function) - loaded_);
    if (found == names_.end()) return "a kernel without a name (is the program stripped?)";
    int status = 0;
    char* plain = abi::__cxa_demangle(found->second, nullptr, nullptr, &status);
    std::string out = status == 0 ? plain : found->second;
    std::free(plain);
    // "void sb::gpu::(anonymous namespace)::forward_kernel<64, false>(CUtensorMap_st, …)": the name alone.
    if (out.starts_with("void ")) out.erase(0, 5);
    for (size_t p; (p = out.find("(anonymous namespace)::")) != std::string::npos;) out.erase(p, 23);
    int depth = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] == '<') ++depth;
      if (out[i] == '>') --depth;
      if (out[i] == '(' && depth == 0) {
        out.resize(i);
        break;
      }
    }
    return out;
  }

 private:
  template <typename T>
  const T* at(size_t offset) const {
    return reinterpret_cast<const T*>(bytes_.data() + offset);
  }
  std::vector<char> bytes_;
  std::map<uintptr_t, const char*> names_;
  uintptr_t loaded_ = 0;  // where the program lies, less where it says that it does
};

std::string place_of(const uint3& p) {
  return std::to_string(p.x) + "," + std::to_string(p.y) + "," + std::to_string(p.z);
}

std::string wait_of(const Thread& thread) {
  char text[160];
  const Block& block = *thread.block;
  switch (thread.waits) {
    case Waits::block_barrier:
      return "wait at __syncthreads, where " + std::to_string(block.barriers[0].arrived) + " of " +
             std::to_string(block.alive) + " have come";
    case Waits::named_barrier:
      std::snprintf(text, sizeof(text), "wait at barrier %u, where %d of %d have come", thread.waits_at,
                    block.barriers[thread.waits_at].arrived, block.barriers[thread.waits_at].threads);
      return text;
    case Waits::collective:
      std::snprintf(text, sizeof(text), "wait for the other lanes of %08x", thread.waits_at);
      return text;
    case Waits::mbarrier:
      std::snprintf(text, sizeof(text),
                    "wait for phase %u of the barrier at %x of shared memory: ", thread.waits_parity, thread.waits_at);
      return text + mbarrier_state(block, thread.waits_at);
    case Waits::products:
      return "wait for products that other lanes of the warp do not wait for";
    case Waits::previous_kernel:
      return "wait for the kernel before this one";
    default:
      return thread.done ? "have ended"
             : std::find(engine.spinning.begin(), engine.spinning.end(), &thread) != engine.spinning.end()
                 ? "read memory again and again that nobody changes"
                 : "are held until the next kernel starts";
  }
}

void report_block(const Block& block) {
  std::fprintf(stderr, "  block %s:\n", place_of(block.index).c_str());
  std::map<std::string, std::vector<int>> threads;
  for (const Thread* thread : block.threads) threads[wait_of(*thread)].push_back(thread->index);
  for (const auto& [what, which] : threads)
    std::fprintf(stderr, "    %zu threads, the first of them %d, %s\n", which.size(), which.front(), what.c_str());
}

struct Spent {
  double seconds = 0;
  uint64_t runs = 0, blocks = 0;
};
struct Table {
  std::map<std::string, Spent> kernels;
  ~Table() {
    if (!engine.options.stats) return;
    for (const auto& [name, spent] : kernels)
      std::fprintf(stderr, "softgpu: %10.3f s %7llu launches %9llu blocks  %s\n", spent.seconds,
                   static_cast<unsigned long long>(spent.runs), static_cast<unsigned long long>(spent.blocks),
                   name.c_str());
    std::fprintf(stderr, "softgpu: %llu switches between threads\n",
                 static_cast<unsigned long long>(statistics().switches));
  }
};

}  // namespace

std::string function_name(const void* function) {
  static const SymbolTable table;
  return table.name(function);
}

std::string Kernel::name() const {
  return function != nullptr ? function_name(function) : library_name;
}

void say_refused(const char* of_what, const char* format, std::va_list arguments) {
  std::fprintf(stderr, "softgpu: refused: %s", of_what);
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
}

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  std::fflush(stdout);
  if (in_kernel())
    std::fprintf(stderr, "softgpu: %s, block %s, thread %s: %s\n", engine.block->grid->kernel->name().c_str(),
                 place_of(engine.block->index).c_str(), place_of(engine.self->place).c_str(), text);
  else
    std::fprintf(stderr, "softgpu: %s\n", text);
  std::abort();
}

void report_deadlock() {
  std::fflush(stdout);
  std::fprintf(stderr, "softgpu: deadlock: nothing can go on\n");
  for (const Grid* grid : engine.grids) {
    if (grid->complete()) continue;
    std::fprintf(stderr, "  %s: %llu of %llu blocks have ended", grid->kernel->name().c_str(),
                 static_cast<unsigned long long>(grid->finished), static_cast<unsigned long long>(grid->blocks));
    if (grid->started < grid->blocks)
      std::fprintf(stderr, "; %llu have not started, since the GPU has room for %d at a time",
                   static_cast<unsigned long long>(grid->blocks - grid->started), resident_most(*grid));
    std::fprintf(stderr, "\n");
    for (const Block* block : grid->resident) report_block(*block);
  }
  std::abort();
}

Statistics& statistics() {
  static Statistics numbers;
  return numbers;
}

void note_kernels(std::span<const Kernel> chain, double seconds) {
  static Table table;
  if (!engine.options.stats) return;
  std::string name = chain.front().name();
  if (chain.size() > 1)
    name += " and " + std::to_string(chain.size() - 1) + " early ones, the last " + chain.back().name();
  Spent& spent = table.kernels[name];
  spent.seconds += seconds;
  ++spent.runs;
  for (const Kernel& kernel : chain) spent.blocks += uint64_t{kernel.grid.x} * kernel.grid.y * kernel.grid.z;
}

}  // namespace softgpu

#ifdef SOFTGPU_TSAN
// The sanitizer knows neither kernels nor who the copy engine and tensor cores work for.
extern "C" void __tsan_on_report(void*) {
  using namespace softgpu;
  if (in_kernel()) std::fprintf(stderr, "softgpu: a race in %s\n", engine.block->grid->kernel->name().c_str());
}
#endif
