// `moire bench --device cuda`: GPU time, beside cuBLAS or a copy.
#pragma once

#include "commands.h"

namespace moire::tool {

int run_gpu_bench(const BenchOptions& options);
// The same in steady state: time, clock, power and energy (sustained.h).
int run_sustained_bench(const BenchOptions& options);

}  // namespace moire::tool
