// Partial sums of a bias' gradient where a block's rows lie in shared memory (core/row_sums.h).
#pragma once

#include "core/row_sums.h"

namespace moire::cuda {

// Sums of two neighbouring columns.
struct TwoSums {
  float first = 0, second = 0;
  __device__ TwoSums& operator+=(const TwoSums& other) {
    first += other.first;
    second += other.second;
    return *this;
  }
};

// The sum of a block's rows first ... end - 1; `value_of(row)` is a row's. Runs do not wait for
// each other, and so neither do their loads.
template <class ValueOf>
__device__ inline auto sum_of_block(int first, int end, ValueOf&& value_of) {
  constexpr int kRun = kRunRows;
  decltype(value_of(0)) sum{};
#pragma unroll 2
  for (int run = first; run < end; run += kRun) {
    decltype(sum) of_run{};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (run + i < end) of_run += value_of(run + i);
    }
    sum += of_run;
  }
  return sum;
}

}  // namespace moire::cuda
