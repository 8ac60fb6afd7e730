// A call of quantize with all that it names.
#pragma once

#include <moire/quantize.h>

#include "tests/ops/quantize_support.h"

namespace moire::test {

// A source and its copies in both directions.
struct QuantizeCall {
  QuantizeCall(DType dtype, DType element, int32_t scaling, const Groups& groups, int64_t k)
      : source(dtype, {groups.capacity, k}),
        rowwise(element, scaling, MOIRE_ROWWISE, groups, k),
        columnwise(element, scaling, MOIRE_COLUMNWISE, groups, k) {
    args.source = source;
    args.scaling = scaling;
    args.rowwise = rowwise;
    args.columnwise = columnwise;
    args.groups = groups;
  }
  TestTensor source;
  TestCopy rowwise, columnwise;
  QuantizeArgs args;
};

}  // namespace moire::test
