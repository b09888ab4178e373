#pragma once

#include <memory>
#include <vector>

#include "core/arena.h"
#include "device/event.h"
#include "device/memory.h"

namespace sb {

// How many of a stage's layer inputs (boundaries) wait for backward in host memory: those of its first layers, which
// wait longest.
struct LayerInputsPlan {
  int layers = 0;
  int on_host = 0;
  int64_t bytes = 0;  // of one input

  // Two places on the device serve all that travel, in turns.
  static int most_on_host(int layers) { return layers > 2 ? layers - 2 : 0; }
  int64_t device_bytes() const { return (layers - on_host) * bytes; }
  int64_t host_bytes() const { return on_host * bytes; }
};

// The inputs of a stage's layers for one micro-batch in flight. Copies to and from host memory run on a stream of their
// own while the layers compute; a layer waits (the device does, never the host) only for a copy that was not done
// within the time of a whole layer. The calls come in the order of the layers forward, then backward.
class LayerInputs {
 public:
  // `copies`: the stream of the copies; none on the CPU, where they are done at once.
  LayerInputs(const LayerInputsPlan& plan, DeviceKind device, std::shared_ptr<void> copies);

  // Takes the device memory of a new micro-batch.
  void begin(Arena& arena, DType dtype, Shape shape);
  TensorView input(int layer) const { return places_[place(layer)].memory; }

  // Forward: around the writing of a layer's input.
  void before_write(const Exec& exec, int layer) const;
  void written(const Exec& exec, int layer);
  // Backward: around a layer's work.
  void before_read(const Exec& exec, int layer) const;
  void done(const Exec& exec, int layer);

 private:
  struct Place {
    TensorView memory;
    DeviceEvent computed, copied;
  };
  // The first on_host + 2 share two places; the last two of these stay there.
  bool shares(int layer) const { return plan_.on_host > 0 && layer < plan_.on_host + 2; }
  size_t place(int layer) const;
  Exec copying(const Exec& exec) const;
  char* host(int layer) const;

  LayerInputsPlan plan_;
  std::shared_ptr<void> copies_;
  HostMemory host_;
  std::vector<Place> places_;
};

}  // namespace sb
