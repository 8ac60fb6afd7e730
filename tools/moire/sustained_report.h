// What `moire bench --sustained` found out, as a table and as JSON lines, whose keys are those of
// scripts/bench_peers.py.
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
