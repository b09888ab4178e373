// The forward without taking turns, for a comparison in one run.
#define SB_VARIANT_NO_TURNS
#define hopper_forward hopper_forward_no_turns
#include "attention/hopper/forward.cu"
