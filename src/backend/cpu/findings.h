// What ops on the CPU found in their data and went on with: infinities and NaN that were quantised.
// The context's check() returns the first of them, which is then forgotten.
#pragma once

#include <moire/context.h>

#include <mutex>
#include <string>
#include <utility>

#include "core/device_state.h"
#include "core/format.h"

namespace moire::cpu {

class Findings {
 public:
  void note(std::string sentence) const {
    const std::lock_guard lock(mutex_);
    if (first_.empty()) first_ = std::move(sentence);
  }
  // Empty where there is none.
  std::string take() const {
    const std::lock_guard lock(mutex_);
    return std::exchange(first_, {});
  }

 private:
  mutable std::mutex mutex_;
  mutable std::string first_;
};

struct CpuState : DeviceState {
  Findings findings;
};

inline const Findings& findings_of(const DeviceState& state) {
  return static_cast<const CpuState&>(state).findings;
}

// That `element` of an operand, "[3, 5]", is not finite; `own` names it unless the call is a step
// of another, which says what it is there.
inline void note_non_finite(const Context& context, const Context::Origin& own,
                            const std::string& element) {
  const Context::Origin origin = context.origin().over(own);
  findings_of(context.state())
      .note(concat(origin.op, ": ", origin.operand, element,
                   " is infinite or NaN: infinities were saturated, NaN kept, in their own "
                   "blocks"));
}

}  // namespace moire::cpu
