// A call of quantize with all that it names.
#pragma once

#include <moire/quantize.h>

#include <vector>

#include "tests/ops/quantize_support.h"

namespace moire::test {

// Splits into so many groups, most of them a row, that a GPU's blocks of threads have tiles of
// several columns to do.
inline std::vector<int64_t> many_groups() {
  std::vector<int64_t> splits(2000, 1);
  splits[300] = 129, splits[600] = 33, splits[601] = 0, splits[602] = 64, splits[603] = 65;
  return splits;
}

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

  // The calls that make other things of the copy in this direction.
  RequantizeArgs requantized(int32_t direction, const moire_quantized& target) const {
    auto again = of_copy<RequantizeArgs>(direction);
    again.target = target;
    return again;
  }
  DequantizeArgs dequantized(int32_t direction, const TestTensor& target) const {
    auto decode = of_copy<DequantizeArgs>(direction);
    decode.target = target;
    return decode;
  }

  TestTensor source;
  TestCopy rowwise, columnwise;
  QuantizeArgs args;

 private:
  template <class Args>
  Args of_copy(int32_t direction) const {
    Args out;
    out.source = direction == MOIRE_ROWWISE ? rowwise : columnwise;
    out.scaling = args.scaling;
    out.direction = direction;
    out.groups = args.groups;
    return out;
  }
};

}  // namespace moire::test
