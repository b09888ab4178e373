#include "model/waiting/layer_inputs.h"

namespace sb {

LayerInputs::LayerInputs(const LayerInputsPlan& plan, DeviceKind device, std::shared_ptr<void> copies)
    : plan_(plan), copies_(std::move(copies)), host_(plan.host_bytes(), device, /*zeroed=*/false) {
  SB_CHECK(0 <= plan.on_host && plan.on_host <= LayerInputsPlan::most_on_host(plan.layers),
           "{} of {} layer inputs in host memory", plan.on_host, plan.layers);
  for (int i = plan.on_host; i < plan.layers; ++i) places_.push_back({{}, DeviceEvent(device), DeviceEvent(device)});
}

size_t LayerInputs::place(int layer) const {
  return static_cast<size_t>(shares(layer) ? layer % 2 : layer - plan_.on_host);
}

Exec LayerInputs::copying(const Exec& exec) const {
  Exec own = exec;
  if (copies_) own.stream = copies_.get();
  return own;
}

char* LayerInputs::host(int layer) const {
  return static_cast<char*>(host_.data()) + layer * plan_.bytes;
}

void LayerInputs::begin(Arena& arena, DType dtype, Shape shape) {
  for (Place& place : places_) place.memory = arena.allocate(dtype, shape);
}

void LayerInputs::before_write(const Exec& exec, int layer) const {
  if (shares(layer)) places_[place(layer)].copied.hold(exec);
}

void LayerInputs::written(const Exec& exec, int layer) {
  if (layer >= plan_.on_host) return;
  Place& from = places_[place(layer)];
  const Exec copy = copying(exec);
  from.computed.record(exec);
  from.computed.hold(copy);
  download(copy, from.memory, host(layer));
  from.copied.record(copy);
}

void LayerInputs::before_read(const Exec& exec, int layer) const {
  if (layer < plan_.on_host) places_[place(layer)].copied.hold(exec);
}

void LayerInputs::done(const Exec& exec, int layer) {
  const int next = layer - 2;
  if (!shares(layer) || next < 0) return;
  Place& to = places_[place(next)];
  const Exec copy = copying(exec);
  to.computed.record(exec);
  to.computed.hold(copy);
  upload(copy, host(next), to.memory);
  to.copied.record(copy);
}

}  // namespace sb
