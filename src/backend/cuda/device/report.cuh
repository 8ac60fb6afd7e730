// How a kernel says that a value on the device is wrong: the first such finding is written to
// memory that the host sees, and the context's next call, or check(), returns it as a sentence.
#pragma once

#include <cstdint>

namespace moire {
struct EndedCall;  // src/parallel/peers.h
}

namespace moire::cuda {

enum class Finding : int32_t {
  kNone = 0,
  kFirstOffset,      // value: offsets[0], must be 0
  kDecreasing,       // group `index` has offsets `limit` to `value`
  kPastCapacity,     // group `index` ends at row `value`, capacity `limit`
  kNegativeSplit,    // group `index` has `value` rows
  kPastOutput,       // group `index` ends at row `value`, times `limit` past the dtype `tensor`
  kIndexOutside,     // entry `index` is `value`, must be below `limit`
  kTooFewRows,       // `value` routed rows, capacity `limit`
  kTooFewScaleRows,  // the groups need `value` rows of `tensor`, which has `limit`
  kNotOncePerRow,    // scatter_idx names `value` rows, the groups have `limit`
  kEndedCall,        // `call` says what
};

// In host memory that the device may write.
struct ErrorRecord {
  volatile Finding finding;  // written last
  const char* op;            // a literal of the host
  const char* tensor;        // likewise; of kIndexOutside and kPastOutput
  int64_t index, value, limit;
  EndedCall* call;  // where kernels write theirs, beside it
};

// What kernels get of it.
struct Reporter {
  ErrorRecord* record;
  uint32_t* is_claimed;  // in device memory: atomics on host memory are not for every machine
  const char* op;
};

#if defined(__CUDACC__)
__device__ inline void report(const Reporter& to, Finding finding, int64_t index, int64_t value,
                              int64_t limit, const char* tensor = nullptr) {
  if (atomicExch(to.is_claimed, 1u) != 0) return;
  to.record->op = to.op;
  to.record->tensor = tensor;
  to.record->index = index;
  to.record->value = value;
  to.record->limit = limit;
  __threadfence_system();
  to.record->finding = finding;
}
#endif

}  // namespace moire::cuda
