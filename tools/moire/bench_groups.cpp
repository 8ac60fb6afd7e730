#include "bench_groups.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "problem_source.h"

namespace moire::tool {
namespace {

const char* const kLayerOps[] = {"fc1", "fc1_dgrad", "fc1_wgrad", "fc2", "mlp_forward", "mlp"};

}  // namespace

std::vector<Group> collect_groups(const ProblemOptions& options,
                                  const std::vector<std::string>& defaults) {
  ProblemOptions plain = options;
  plain.ops.clear();
  plain.dtypes.clear();
  // What is said of the other fields may make sense in the op and dtype that are measured only.
  std::erase_if(plain.settings, [](const std::string& s) {
    return !s.starts_with("op=") && !s.starts_with("dtype=");
  });
  std::vector<Group> groups;
  for (const Problem& base : collect_problems(plain)) {
    std::vector<std::string> ops = options.ops;
    if (ops.empty() && base.is("mlp")) ops.assign(std::begin(kLayerOps), std::end(kLayerOps));
    if (ops.empty()) ops.emplace_back(base.op->name);
    std::vector<std::string> dtypes = options.dtypes;
    if (dtypes.empty()) dtypes = defaults;
    for (std::string& dtype : dtypes) {
      if (dtype.empty()) dtype = base.dtype == DType::kFP16 ? "fp16" : "bf16";
    }
    for (const std::string& op : ops) {
      Group group;
      for (const std::string& dtype : dtypes) {
        const auto settings = with_value(with_value(options.settings, "op", op), "dtype", dtype);
        group.problems.push_back(usage(with_settings(base, settings)));
      }
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

Problem smaller(const Problem& p) {
  constexpr int64_t kWidth = 192, kRows = 48, kGroups = 4;
  Problem small = p;
  small.groups = std::min(p.groups, kGroups);
  small.hidden = std::min(p.hidden, kWidth);
  if (p.ffn > kWidth) {
    small.ffn = kWidth;
    if (p.layout.block > 1) small.layout.block = std::gcd(p.layout.block, kWidth);
  }
  small.rows = small.groups == 0 ? 0 : std::min(p.rows, kRows);
  small.topk = std::min(p.topk, std::max<int64_t>(1, small.groups));
  small.dropped = (small.topk - small.rows % small.topk) % small.topk;
  small.splits = Splits();
  if (small.groups > 0) small.splits.kind = Splits::Kind::kRagged;
  return small;
}

}  // namespace moire::tool
