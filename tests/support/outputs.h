// All outputs of a call, by the fields of its struct: against the reference, and against those of
// another call.
#pragma once

#include <moire/fields.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "reference/outputs.h"
#include "tests/support/expect.h"

namespace moire::test {

testing::AssertionResult all_match(const std::vector<reference::OutputErrors>& outputs);

// Each output that is there holds what the reference says, and its tail what the call asks for.
template <class A, class Want>
testing::AssertionResult outputs_match(const A& args, const Want& want) {
  return all_match(reference::compare_outputs(args, want));
}

// Runs a call and holds its outputs to the reference.
template <class A>
void expect_right(const Tested& context, const A& args) {
  const auto want = reference::truth(args);  // what is added to is still there
  ASSERT_TRUE(succeeds(run(context, args)));
  EXPECT_TRUE(outputs_match(args, want));
}

// What a call writes, named: tensors, and weights that may be lists.
struct Written : MemoryVisitor {
  using MemoryVisitor::field;
  void field(const char* name, const moire_tensor& t, Role role, const char*) {
    if (is_written(role) && is_present(t)) tensors.emplace_back(name, t);
  }
  void field(const char* name, const moire_weight& w, Role role, const char*) {
    if (is_written(role) && is_present(w)) weights.emplace_back(name, w);
  }
  void field(const char* name, const moire_quantized& q, Role role, const char* sizes) {
    field(name, q.data, role, sizes);
    field(name, q.scales, role, sizes);
  }
  void field(const char*, const moire_offsets_output*, Role, int64_t) {}

  std::vector<std::pair<std::string, TensorView>> tensors;
  std::vector<std::pair<std::string, moire_weight>> weights;
};

testing::AssertionResult same_written(const Written& got, const Written& want);
void poison(const Written& outputs);
std::vector<std::vector<std::byte>> bytes_of(const Written& outputs);

// The outputs of two calls of an op hold the same bytes.
template <class A>
testing::AssertionResult same_outputs(const A& got, const A& want) {
  Written of_got, of_want;
  visit_fields(got, of_got);
  visit_fields(want, of_want);
  return same_written(of_got, of_want);
}

// A call that adds to nothing has the same outputs on any number of threads; they stay there.
template <class A>
void expect_same_on_any_threads(const A& args) {
  Written outputs;
  visit_fields(args, outputs);
  ASSERT_TRUE(succeeds(run(cpu(1), args)));
  const auto once = bytes_of(outputs);
  for (int threads = 2; threads <= 7; ++threads) {
    poison(outputs);
    ASSERT_TRUE(succeeds(run(cpu(threads), args)));
    EXPECT_EQ(bytes_of(outputs), once) << threads << " threads";
  }
}

}  // namespace moire::test
