#pragma once

namespace softgpu {

// From now on a fault in the device's memory says what was touched, and by whom.
void report_faults();

}  // namespace softgpu
