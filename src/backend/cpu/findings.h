// What ops on the CPU found in their data and went on with: infinities and NaN that were quantised.
// The context's check() returns the first of them, which is then forgotten.
#pragma once

#include <moire/context.h>

#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "core/device_state.h"
#include "core/format.h"

namespace moire::cpu {

class Findings {
 public:
  // `sentence()` says what was found. Outputs have been written by then, so that no memory for the
  // text is no error: the finding is told without saying where.
  template <class Sentence>
  void note(Sentence&& sentence) const noexcept {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_found_, true)) return;
    try {
      first_ = sentence();
    } catch (const std::bad_alloc&) {
      first_.clear();
    }
  }
  // Empty where there is none.
  std::string take() const {
    const std::lock_guard lock(mutex_);
    if (is_found_ && first_.empty()) first_ = "something quantised is infinite or NaN";
    is_found_ = false;
    return std::exchange(first_, {});
  }

 private:
  mutable std::mutex mutex_;
  mutable bool is_found_ = false;
  mutable std::string first_;
};

struct CpuState : DeviceState {
  Findings findings;
};

inline const Findings& findings_of(const DeviceState& state) {
  return static_cast<const CpuState&>(state).findings;
}

// That an element of an operand is not finite, `element()` says which ("[3, 5]"); `own` names the
// operand unless the call is a step of another, which says what it is there.
template <class Element>
void note_non_finite(const Context& context, const Context::Origin& own, Element&& element) {
  const Context::Origin origin = context.origin().over(own);
  findings_of(context.state()).note([&] {
    return concat(origin.op, ": ", origin.operand, element(),
                  " is infinite or NaN: infinities were saturated, NaN kept, in their own blocks");
  });
}

}  // namespace moire::cpu
