// Comparisons whose failure says the first mismatch: coordinate, group, got, want, how many. Use
// with EXPECT_TRUE / EXPECT_FALSE.
#pragma once

#include <gtest/gtest.h>
#include <moire/context.h>
#include <moire/groups.h>

#include "reference/quantize.h"
#include "reference/tensor.h"
#include "staging/entry.h"
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

// Runs the op of a struct; if it takes a workspace, in one of the size that it asks for, full of
// garbage, of which it has to stay inside.
template <class A>
Status run(const Tested& context, A args) {
  using Entry = staging::Entry<A>;
  if constexpr (!Entry::kHasWorkspace) {
    return context.call(args, Entry::kRun);
  } else {
    size_t bytes = 0;
    if (Status status = context.size(args, &bytes, Entry::kWorkspace); !status.ok()) return status;
    const TestWorkspace workspace(bytes);
    args.workspace = workspace.get();
    Status status = context.call(args, Entry::kRun);
    EXPECT_TRUE(workspace.is_undamaged()) << "written outside its workspace";
    return status;
  }
}

}  // namespace moire::test
