// Comparisons whose failure says the first mismatch: coordinate, group, got, want, how many. Use
// with EXPECT_TRUE / EXPECT_FALSE.
#pragma once

#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/groups.h>

#include "reference/quantize.h"
#include "reference/tensor.h"
#include "tests/support/tensors.h"
#include "tests/support/tested.h"

namespace moire::test {

// The rows in use of `got` are within the bounds of `want` (reference::accepts). `groups` is there
// to name the group of a mismatch.
testing::AssertionResult matches(const TensorView& got, const reference::Matrix& want,
                                 const moire_groups& groups = {});
testing::AssertionResult matches(const moire_weight& got, const reference::Weights& want);

// The first `rows` rows (all where negative) of two tensors hold the same bytes.
testing::AssertionResult same_bits(const TensorView& got, const TensorView& want,
                                   int64_t rows = -1);
testing::AssertionResult same_bits(const moire_weight& got, const moire_weight& want);
// Rows that the reference owns hold its bytes; the others are its tail.
testing::AssertionResult same_bytes(const TensorView& got, const reference::ByteRows& want,
                                    int32_t tail);
testing::AssertionResult same_indices(const TensorView& got, const std::vector<int64_t>& want);

// Rows past the last group are all zero bits, or still poisoned.
testing::AssertionResult tail_is_zero(const TensorView& t, const moire_groups& groups);
testing::AssertionResult tail_is_untouched(const TensorView& t, const moire_groups& groups);

// The status is OK, or has this code and its message contains `text`.
testing::AssertionResult succeeds(const Status& status);
testing::AssertionResult fails(const Status& status, Code code, const std::string& text);

// A CPU context; 0 threads = one per core.
Context cpu(int num_threads = 0);

// Sizes the workspace, runs the op in one full of garbage, and checks that it stayed inside.
template <class A, class Op, class Size>
Status run(const Tested& context, A args, const Op& op, const Size& size) {
  size_t bytes = 0;
  if (Status status = size(context, args, &bytes); !status.ok()) return status;
  const TestWorkspace workspace(bytes);
  args.workspace = workspace.get();
  Status status = op(context, args);
  EXPECT_TRUE(workspace.is_undamaged()) << "written outside its workspace";
  return status;
}

}  // namespace moire::test
