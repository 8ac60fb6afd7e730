// How a kernel says that what it quantised holds an infinity or NaN. Unlike report.cuh's findings
// it is no error and fails no call: the context's check() tells of the first call that met one, and
// of its first such element in the order of the rows, as the CPU does.
#pragma once

#include <cstdint>

namespace moire::cuda {

// Which call's elements; literals of the host, which names the element when it is asked.
struct NonFiniteCall {
  uint32_t id;  // from 1 on
  const char *op, *operand;
  uint32_t op_length, operand_length;
  int64_t matrix_rows;  // of weights, whose rows count through all matrices; 0: ragged
  bool is_decoded;      // what is quantised again
};

// In device memory. `call.id` is 0 where nothing was found, and is written last.
struct NonFiniteRecord {
  uint32_t lock;
  NonFiniteCall call;
  int64_t row, column;  // in the order in which rows are quantised
  int64_t named_row;    // the row of the source
};

struct NonFiniteReporter {
  NonFiniteRecord* record;
  NonFiniteCall call;
};

#if defined(__CUDACC__)
// For one thread of a warp. Of rows that come later than one found before nobody asks, so that a
// matrix of nothing but NaN does not queue for the lock.
__device__ inline void note_non_finite(const NonFiniteReporter& to, int64_t row, int64_t column,
                                       int64_t named_row) {
  volatile NonFiniteRecord* record = to.record;
  // Another call came first, but the next one, which may share this launch.
  const auto is_free = [&](uint32_t id) { return id == 0 || id == to.call.id + 1; };
  const auto is_settled = [&] {
    const uint32_t id = record->call.id;
    return id != to.call.id ? !is_free(id) : record->row < row;
  };
  if (is_settled()) return;
  while (atomicExch(&to.record->lock, 1U) != 0) __nanosleep(100);
  __threadfence();
  const uint32_t id = record->call.id;
  const bool is_first =
      id == to.call.id && (record->row < row || (record->row == row && record->column <= column));
  if (is_free(id) || (id == to.call.id && !is_first)) {
    record->row = row;
    record->column = column;
    record->named_row = named_row;
    record->call.op = to.call.op;
    record->call.operand = to.call.operand;
    record->call.op_length = to.call.op_length;
    record->call.operand_length = to.call.operand_length;
    record->call.matrix_rows = to.call.matrix_rows;
    record->call.is_decoded = to.call.is_decoded;
    __threadfence();
    record->call.id = to.call.id;
  }
  __threadfence();
  atomicExch(&to.record->lock, 0U);
}
#endif

}  // namespace moire::cuda
