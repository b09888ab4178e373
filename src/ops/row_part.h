#pragma once

namespace sb {

// What the loss has to know of a part of a row of logits.
struct RowPart {
  float largest;
  float sum;     // Σ exp(logit - largest)
  float others;  // the largest apart from the label's
  float target;  // the label's, -inf where it is in another part
};
static_assert(sizeof(RowPart) == 4 * sizeof(float));

}  // namespace sb
