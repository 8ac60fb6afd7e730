// Ring: where a role stands in a ring of stages that are filled and emptied in turn. Each stage has
// a `full` and an `empty` barrier; the producer waits for empty, the consumer for full.
#pragma once

#include "backend/cuda/ptx/mbarrier.cuh"

namespace moire::cuda {

template <int kNumStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;  // parity of the round

  __device__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ void end_tile() {}
  // Past stages that are somebody else's.
  __device__ void skip(int count) {
    const int reached = stage + count;
    stage = reached % kNumStages;
    phase ^= reached / kNumStages & 1;
  }
  // For a whole warp: the stage, known to be the same in all lanes. What is made of it, descriptors
  // of operands above all, then takes uniform registers and one lane's work.
  __device__ int uniform_stage() const { return __shfl_sync(~0u, stage, 0); }
  // For the producer: the stage's last consumer has left. The first round waits for nobody.
  __device__ void wait_empty(uint64_t* empty) const {
    ptx::mbarrier_wait_parity(&empty[stage], phase ^ 1);
  }
  // For a consumer: the stage's data have come.
  __device__ void wait_full(uint64_t* full) const {
    ptx::mbarrier_wait_parity(&full[stage], phase);
  }
};

// The same where every tile begins at the first stage, so that the places of a loop over stages are
// constants. A tile leaves out the stages behind its last: so each has a round of its own.
template <int kNumStages>
struct RestartedRing {
  int stage = 0;
  uint32_t phases = 0;  // a bit a stage: the parity of its round

  __device__ void pass(int passed) { phases ^= 1u << passed; }
  __device__ void advance() {
    pass(stage);
    if (++stage == kNumStages) stage = 0;
  }
  __device__ void end_tile() { stage = 0; }
  __device__ uint32_t phase(int of_stage) const { return phases >> of_stage & 1; }
  __device__ void wait_empty(uint64_t* empty) const {
    ptx::mbarrier_wait_parity(&empty[stage], phase(stage) ^ 1);
  }
  __device__ void wait_full(uint64_t* full) const {
    ptx::mbarrier_wait_parity(&full[stage], phase(stage));
  }
};

}  // namespace moire::cuda
