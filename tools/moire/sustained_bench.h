// `moire bench --device cuda --sustained`: each op beside cuBLAS and a dense product, in steady
// state. What it found out is a table or JSON lines, whose keys are those of
// scripts/bench_peers.py. bench.h has the function that runs it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_result.h"
#include "sustained.h"

namespace moire::tool {

struct SustainedResult {
  BenchResult facts;            // problem, implementation, FLOP and bytes, the check
  std::vector<Measured> peers;  // "moire" first; "dense" is the product of 8192^3
};

// How long it will take, said beforehand.
std::string sustained_plan(const SustainedProtocol& protocol, int64_t num_stretches,
                           double setup_seconds);
std::string sustained_table(const std::vector<SustainedResult>& results);
nlohmann::ordered_json to_json(const SustainedResult& result, const SustainedProtocol& protocol);

}  // namespace moire::tool
