// Explanation: what a call runs, and why not something faster. Filled by an explaining Context.
#pragma once

#include <moire/status.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moire {

// An implementation that did not run, and the first reason why.
struct Refusal {
  std::string implementation;
  std::string reason;
};

// One op of a call.
struct Step {
  std::string op;              // "grouped_gemm_glu"
  std::string problem;         // "128 groups, capacity 512, [512, 2048] x [128, 1536, 2048] bf16"
  std::string implementation;  // "cpu"
  std::string policy;          // how it runs: tiles, K block, threads
  int64_t launches = 1;        // kernels on a GPU; 1 on the CPU
  int64_t bytes_read = 0;      // operands once each, every row of the capacity in use
  int64_t bytes_written = 0;
  int64_t workspace_bytes = 0;
  std::vector<Refusal> refused = {};  // faster ones, in order
};

using Explanation = std::vector<Step>;

MOIRE_API std::string to_json(const Explanation& explanation);

// An implementation that this build has of an op.
struct AvailableImplementation {
  std::string op;
  std::string device;  // "cpu", "cuda"
  std::string name;    // "cpu", "cuda", "portable", "sm90"
};

// Those of every op, in the order in which they are tried; whether one takes a call depends on the
// call.
MOIRE_API std::vector<AvailableImplementation> available_implementations();

}  // namespace moire
