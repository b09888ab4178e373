#include "ops/cross_entropy.h"

#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/row_part.h"

namespace sb {
namespace {

void check_loss_operands(const Exec& exec, const char* operation, const TensorView& hidden, const TensorView& weight,
                         const TensorView& labels, const TensorView& weights, int64_t chunk,
                         const TensorView& token_loss) {
  const int64_t tokens = hidden.dim(0), width = hidden.dim(1);
  SB_CHECK(weight.dim(0) > 0, "{}: a vocabulary of none", operation);
  SB_CHECK(chunk > 0, "{}: chunks of {} tokens", operation, chunk);
  check_operand(exec, operation, "hidden", hidden, hidden.dtype(), {tokens, width});
  check_operand(exec, operation, "weight", weight, hidden.dtype(), {weight.dim(0), width});
  check_operand(exec, operation, "labels", labels, DType::i32, {tokens});
  check_operand(exec, operation, "weights", weights, DType::f32, {tokens});
  if (!token_loss.empty()) check_operand(exec, operation, "token_loss", token_loss, DType::f32, {tokens});
}

void check_host_labels(std::span<const int32_t> host_labels, const TensorView& labels) {
  SB_CHECK(host_labels.empty() || std::ssize(host_labels) == labels.elements(),
           "{} labels on the host, {} on the device", host_labels.size(), labels.elements());
}

}  // namespace

void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, std::span<const int32_t> host_labels,
                  const VocabularyPart& part) {
  check_loss_operands(exec, "loss_forward", hidden, weight, labels, weights, chunk, token_loss);
  if (exec.device == DeviceKind::cuda) {
    check_host_labels(host_labels, labels);
    return cuda::loss_forward(exec, hidden, weight, labels, weights, chunk, token_loss, sums, host_labels, part);
  }
  cpu::loss_forward(exec, hidden, weight, labels, weights, chunk, token_loss, sums, part);
}

void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, std::span<const int32_t> host_labels, bool accumulate,
                           const VocabularyPart& part) {
  check_loss_operands(exec, "loss_forward_backward", hidden, weight, labels, weights, chunk, token_loss);
  check_operand(exec, "loss_forward_backward", "dhidden", dhidden, hidden.dtype(), hidden.shape());
  if (!dweight.empty()) check_operand(exec, "loss_forward_backward", "dweight", dweight, DType::f32, weight.shape());
  SB_CHECK(hidden.empty() || hidden.raw() != dhidden.raw(), "loss_forward_backward: hidden and dhidden alias");
  if (exec.device == DeviceKind::cuda) {
    check_host_labels(host_labels, labels);
    return cuda::loss_forward_backward(exec, hidden, weight, labels, weights, chunk, token_loss, dhidden, dweight, sums,
                                       host_labels, accumulate, part);
  }
  cpu::loss_forward_backward(exec, hidden, weight, labels, weights, chunk, token_loss, dhidden, dweight, sums,
                             accumulate, part);
}

int64_t loss_scratch_bytes(DeviceKind device, DType dtype, int64_t vocabulary, int64_t chunk, int ranks) {
  const int64_t sums = device == DeviceKind::cuda ? Arena::rounded(sizeof(LossSums)) : 0;
  const int64_t parts = ranks > 1 ? Arena::rounded(ranks * chunk * static_cast<int64_t>(sizeof(RowPart))) : 0;
  return parts + Arena::rounded(vocabulary * chunk * dtype_bytes(dtype)) +
         2 * Arena::rounded(chunk * static_cast<int64_t>(sizeof(float))) + sums;
}

}  // namespace sb
