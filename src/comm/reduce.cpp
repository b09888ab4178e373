#include "comm/reduce.h"

#include <type_traits>

#include "device/float16.h"

namespace sb {

int64_t comm_type_bytes(CommType type) {
  switch (type) {
    case CommType::u8:
      return 1;
    case CommType::bf16:
      return 2;
    case CommType::i32:
    case CommType::f32:
      return 4;
    case CommType::i64:
    case CommType::f64:
      return 8;
  }
  throw InternalError("no communication type {}", static_cast<int>(type));
}

namespace {

// Each sum is rounded.
struct Bf16 {
  uint16_t bits;
  operator float() const { return f32_from_bf16(bits); }
  Bf16& operator=(float value) {
    bits = bf16_from_f32(value);
    return *this;
  }
};

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, Bf16>, float, T>;

template <typename T>
void combine_typed(T* __restrict into, const T* __restrict other, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      for (int64_t i = 0; i < count; ++i) into[i] = static_cast<Sum<T>>(into[i] + other[i]);
      return;
    case ReduceOp::max:
      for (int64_t i = 0; i < count; ++i) into[i] = other[i] > into[i] ? other[i] : into[i];
      return;
    case ReduceOp::min:
      for (int64_t i = 0; i < count; ++i) into[i] = other[i] < into[i] ? other[i] : into[i];
      return;
  }
}

}  // namespace

void combine(void* into, const void* other, int64_t count, CommType type, ReduceOp op) {
  switch (type) {
    case CommType::u8:
      return combine_typed(static_cast<uint8_t*>(into), static_cast<const uint8_t*>(other), count, op);
    case CommType::i32:
      return combine_typed(static_cast<int32_t*>(into), static_cast<const int32_t*>(other), count, op);
    case CommType::i64:
      return combine_typed(static_cast<int64_t*>(into), static_cast<const int64_t*>(other), count, op);
    case CommType::f32:
      return combine_typed(static_cast<float*>(into), static_cast<const float*>(other), count, op);
    case CommType::bf16:
      return combine_typed(static_cast<Bf16*>(into), static_cast<const Bf16*>(other), count, op);
    case CommType::f64:
      return combine_typed(static_cast<double*>(into), static_cast<const double*>(other), count, op);
  }
}

}  // namespace sb
