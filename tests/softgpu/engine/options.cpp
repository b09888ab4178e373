#include "softgpu/interface/options.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace softgpu {
namespace {

[[noreturn]] void unknown(const char* name, const char* value, const char* words) {
  std::fprintf(stderr, "softgpu: %s=%s is none of %s\n", name, value, words);
  std::exit(2);
}

// "random:7" is random with the seed 7.
bool is_random(const char* name, std::string_view value, uint32_t& seed) {
  if (!value.starts_with("random")) return false;
  value.remove_prefix(6);
  if (value.empty()) return true;
  char* end = nullptr;
  seed = static_cast<uint32_t>(std::strtoul(value.data() + 1, &end, 10));
  if (value[0] != ':' || value.size() < 2 || *end != 0) unknown(name, value.data(), "random, random:<seed>");
  return true;
}

void read_when(const char* name, When& when, uint32_t& seed) {
  const char* value = std::getenv(name);
  if (value == nullptr) return;
  const std::string_view text = value;
  if (text == "late")
    when = When::late;
  else if (text == "eager")
    when = When::eager;
  else if (is_random(name, text, seed))
    when = When::random;
  else
    unknown(name, value, "late, eager, random:<seed>");
}

Options read() {
  Options o;
  if (const char* value = std::getenv("SOFTGPU_ORDER"); value != nullptr) {
    const std::string_view text = value;
    if (text == "forward")
      o.order = Order::forward;
    else if (text == "reverse")
      o.order = Order::reverse;
    else if (is_random("SOFTGPU_ORDER", text, o.order_seed))
      o.order = Order::random;
    else
      unknown("SOFTGPU_ORDER", value, "forward, reverse, random:<seed>");
  }
  read_when("SOFTGPU_COPIES", o.copies, o.copies_seed);
  read_when("SOFTGPU_STREAMS", o.streams, o.streams_seed);
  if (const char* value = std::getenv("SOFTGPU_DEVICE"); value != nullptr) {
    const std::string_view text = value;
    if (text == "a100")
      o.device = Model::a100;
    else if (text != "h200")
      unknown("SOFTGPU_DEVICE", value, "h200, a100");
  }
  if (const char* value = std::getenv("SOFTGPU_STATS"); value != nullptr) o.stats = std::string_view(value) != "0";
  return o;
}

}  // namespace

const Options& options() {
  static const Options read_once = read();
  return read_once;
}

}  // namespace softgpu
