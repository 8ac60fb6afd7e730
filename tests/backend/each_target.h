// Runs a piece of a test once for each SIMD target that was compiled and that this machine runs.
#pragma once

#include <gtest/gtest.h>

#include "backend/cpu/simd_targets.h"

// Highway's headers come after simd_targets.h.
#include <hwy/targets.h>

namespace moire::cpu {

// The targets without fused multiply-add are left out: no context runs on them.
template <class F>
void for_each_target(F&& body) {
  constexpr int64_t kWithoutFma = HWY_EMU128 | HWY_SCALAR;
  int64_t targets = hwy::SupportedTargets() & HWY_TARGETS & ~kWithoutFma;
  ASSERT_NE(targets, 0) << "this machine runs no compiled SIMD target";
  while (targets != 0 && !::testing::Test::HasFatalFailure()) {
    const int64_t target = targets & -targets;
    targets ^= target;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::GetChosenTarget().Update(target);
    body();
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace moire::cpu
