#include <cstddef>
#include <cstdint>
#include <span>

#include "core/errors.h"
#include "model/tensors/safetensors.h"

// Any bytes are either refused with a UserError or describe tensors that lie inside the file, one after the other.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sb::SafetensorsHeader header;
  try {
    header = sb::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz.safetensors");
  } catch (const sb::UserError&) {
    return 0;
  }
  int64_t place = header.data_offset;
  for (const sb::SafetensorsEntry& entry : header.entries) {
    SB_CHECK(header.data_offset + entry.begin == place && entry.begin <= entry.end && entry.elements() >= 0,
             "tensor {} at {} to {}", entry.name, entry.begin, entry.end);
    place = header.data_offset + entry.end;
  }
  SB_CHECK(place == static_cast<int64_t>(size), "tensors end at {} of {}", place, size);
  return 0;
}
