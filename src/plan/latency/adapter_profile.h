#pragma once

#include "plan/latency/profile.h"

namespace sb {

// The profile of training adapters of this rank, on all products of a layer, with the model itself frozen (rank 0: of
// training the whole model). One that was measured so stays as it is. One of the whole model loses its products for
// weight gradients and gets those of the adapters, by their share of the operations; `adapters_measured` stays false.
// UserError when it was measured with adapters of another rank.
Profile with_adapters(Profile profile, int64_t rank);

}  // namespace sb
