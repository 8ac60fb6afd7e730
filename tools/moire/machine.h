// What the machine can do and what else it is doing: the roofline and the conditions of a
// benchmark.
#pragma once

#include <cstdint>

#include "memory.h"
#include "staging/team.h"

namespace moire::tool {

using staging::Team;

// Two blocks of memory that is there, of which one is copied to the other.
struct CopyBlocks {
  explicit CopyBlocks(int64_t bytes);
  Memory memory;
  char *source, *target;
};
// Bytes copied by all threads of a team, each its share.
void team_copy(Team& team, const void* source, void* target, int64_t bytes);

int available_cores();
int64_t last_level_cache_bytes();  // 0 if unknown
int64_t available_memory_bytes();

// FP32 fused multiply-adds of all threads, as FLOP/s; about 50 ms.
double measure_peak_flops(Team& team);
// Bytes read and written per second by a copy much larger than the caches.
double measure_copy_bandwidth(Team& team);

// CPU time since boot, in seconds of one core.
struct CpuTimes {
  double busy = 0;    // of all processes
  double stolen = 0;  // taken by the hypervisor
  double own = 0;     // of this process
  double wall = 0;
};
CpuTimes read_cpu_times();

}  // namespace moire::tool
