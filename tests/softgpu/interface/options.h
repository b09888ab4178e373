#pragma once

// How strict the software device is in this process, from the environment. Every choice a real device is free to make
// is made by one of these, so that a run can be repeated.
//
//   SOFTGPU_ORDER    forward | reverse | random:N   which thread, warp and block goes on next (default forward)
//   SOFTGPU_COPIES   late | eager | random:N        when copies happen that run by themselves (default late);
//                                                   products always happen when they are waited for
//   SOFTGPU_STREAMS  late | eager | random:N        which stream goes on next (default late: what is waited for)
//   SOFTGPU_DEVICE   h200 | a100                    an a100 has no Hopper instructions (default h200)
//   SOFTGPU_STATS    1                              prints what every kernel took at the end
//
// Read once; a word that none of them knows ends the program.

#include <cstdint>

namespace softgpu {

enum class Order { forward, reverse, random };
enum class When { late, eager, random };
enum class Model { h200, a100 };

struct Options {
  Order order = Order::forward;
  uint32_t order_seed = 1;
  When copies = When::late;
  uint32_t copies_seed = 1;
  When streams = When::late;
  uint32_t streams_seed = 1;
  Model device = Model::h200;
  bool stats = false;
};

const Options& options();  // given by the engine

}  // namespace softgpu
