// One row of a call: the same operands, cut down to a row that the scalar reference can afford at
// the full width of a model. `moire bench` judges by it what it is about to time.
#pragma once

#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>

#include <memory>

namespace moire::tool {

// The cut arguments and the offsets that they point to.
template <class A>
struct Sample {
  A args;
  std::shared_ptr<int64_t[]> offsets;
};

// Row `row`, which belongs to `group`. Results that sum over rows (gradients of weights and biases)
// are left out; of a weight gradient itself, a corner of the group's matrix is kept instead.
Sample<GroupedGemmArgs> one_row(const GroupedGemmArgs& args, int64_t row, int64_t group);
Sample<GroupedGemmGluArgs> one_row(const GroupedGemmGluArgs& args, int64_t row, int64_t group);
Sample<GroupedGemmGluBackwardArgs> one_row(const GroupedGemmGluBackwardArgs& args, int64_t row,
                                           int64_t group);
Sample<GroupedGemmWgradArgs> one_row(const GroupedGemmWgradArgs& args, int64_t row, int64_t group);
Sample<BiasBackwardArgs> one_row(const BiasBackwardArgs& args, int64_t row, int64_t group);
Sample<GluArgs> one_row(const GluArgs& args, int64_t row, int64_t group);
Sample<GluBackwardArgs> one_row(const GluBackwardArgs& args, int64_t row, int64_t group);
Sample<GroupedLinearArgs> one_row(const GroupedLinearArgs& args, int64_t row, int64_t group);
Sample<GroupedLinearBackwardArgs> one_row(const GroupedLinearBackwardArgs& args, int64_t row,
                                          int64_t group);
Sample<GroupedMlpArgs> one_row(const GroupedMlpArgs& args, int64_t row, int64_t group);
Sample<GroupedMlpBackwardArgs> one_row(const GroupedMlpBackwardArgs& args, int64_t row,
                                       int64_t group);

}  // namespace moire::tool
