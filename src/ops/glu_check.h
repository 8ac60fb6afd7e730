// What every op with a gated activation checks about it.
#pragma once

#include <cmath>

#include "core/argument_check.h"
#include "core/glu_layout.h"

namespace moire {

inline bool check_activation(ArgumentCheck& check, const moire_activation& activation) {
  check.enumerator("activation.kind", activation.kind, 3);
  if (activation.kind != MOIRE_CLAMPED_SWIGLU) return check.ok();
  check.require(activation.limit > 0, "activation.limit is ", activation.limit, ", must be > 0");
  check.require(activation.alpha > 0, "activation.alpha is ", activation.alpha, ", must be > 0");
  return check.require(std::isfinite(activation.offset), "activation.offset is ", activation.offset,
                       ", must be finite");
}

// A layout of 2F positions for a known F.
inline bool check_glu_layout(ArgumentCheck& check, std::string_view name,
                             const moire_glu_layout& layout, int64_t f) {
  check.enumerator(concat(name, ".order"), layout.order, 2);
  return check.require(is_valid_glu_layout(layout, f), name, ".block is ", layout.block,
                       ", must divide F = ", f, " (0: F)");
}

// Groups of an op that may do without them: absent means that every row is in use.
inline bool groups_are_absent(const moire_groups& g) {
  return g.offsets == nullptr && g.num_groups == 0 && g.capacity == 0;
}

}  // namespace moire
