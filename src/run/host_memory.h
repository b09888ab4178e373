#pragma once

#include <cstdint>

namespace sb {

// Bytes this process can still take: what the machine has available and what its control group leaves. 0: unknown.
int64_t available_host_memory();

}  // namespace sb
