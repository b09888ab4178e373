#include "ops/dropout.h"

#include "core/random.h"
#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {
namespace {

void check_rows(const Exec& exec, const char* operation, const DropoutRows& rows, const TensorView& from,
                const TensorView& to) {
  const int64_t tokens = from.dim(0);
  check_operand(exec, operation, "from", from, from.dtype(), {tokens, from.dim(1)});
  check_operand(exec, operation, "to", to, from.dtype(), from.shape());
  check_operand(exec, operation, "sequences", rows.sequences, DType::i32, {tokens});
  check_operand(exec, operation, "positions", rows.positions, DType::i32, {tokens});
  SB_CHECK(0.0 <= rows.probability && rows.probability < 1.0, "{}: a probability of {}", operation, rows.probability);
}

}  // namespace

uint64_t dropout_key(uint64_t seed, int64_t step) {
  constexpr uint64_t kStream = 0x64726f70;  // "drop": no other use of the seed has it
  const auto bits = Random::block(seed, static_cast<uint64_t>(step), kStream);
  return uint64_t{bits[1]} << 32 | bits[0];
}

void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to) {
  check_rows(exec, "dropout", rows, from, to);
  if (from.elements() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::dropout(exec, rows, from, to, /*add=*/false);
  cpu::dropout(exec, rows, from, to, /*add=*/false);
}

void add_dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to) {
  check_rows(exec, "add_dropout", rows, from, to);
  if (from.elements() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::dropout(exec, rows, from, to, /*add=*/true);
  cpu::dropout(exec, rows, from, to, /*add=*/true);
}

}  // namespace sb
