#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace sb::log {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made =
        std::make_shared<spdlog::logger>("sparsebalance", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%H:%M:%S %^%l%$ %v");
    return made;
  }();
  return *instance;
}

spdlog::level::level_enum translate(Level level) {
  switch (level) {
    case Level::debug:
      return spdlog::level::debug;
    case Level::info:
      return spdlog::level::info;
    case Level::warning:
      return spdlog::level::warn;
    case Level::error:
      return spdlog::level::err;
    case Level::off:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

}  // namespace

void set_level(Level level) {
  logger().set_level(translate(level));
}

void set_prefix(std::string prefix) {
  logger().set_pattern(prefix.empty() ? "%H:%M:%S %^%l%$ %v" : "%H:%M:%S [" + prefix + "] %^%l%$ %v");
}

void write(Level level, std::string_view message) {
  logger().log(translate(level), spdlog::string_view_t(message.data(), message.size()));
}

}  // namespace sb::log
