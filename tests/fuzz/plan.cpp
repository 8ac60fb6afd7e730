#include "tests/fuzz/plan.h"

#include <algorithm>

namespace moire::fuzz {
namespace {

int64_t some_size(Random& random) {
  if (random.percent(70)) return random.integer(1, 40);
  return random.pick<int64_t>({0, 1, 31, 32, 33, 64, 127, 128, 129, 160, 200});
}

}  // namespace

Plan::Plan(Random& random)
    : tokens(random.percent(80) ? random.integer(1, 12) : random.pick<int64_t>({0, 60, 150, 300})),
      choices(random.integer(1, 3)),
      num_groups(random.pick<int64_t>({0, 1, 1, 2, 2, 3, 4, 7})),
      experts(random.integer(choices, 9)),
      k(some_size(random)),
      m(some_size(random)),
      n(some_size(random)),
      h(some_size(random)),
      f(some_size(random)) {
  const int64_t groups = num_groups;
  topk_idx.resize(static_cast<size_t>(tokens * choices));
  const int64_t favourite = groups == 0 ? 0 : random.integer(0, groups - 1);
  for (int64_t& expert : topk_idx) {
    const bool is_dropped = groups == 0 || random.percent(10);
    expert = is_dropped           ? random.pick<int64_t>({-1, groups})
             : random.percent(40) ? favourite
                                  : random.integer(0, groups - 1);
  }
  splits.assign(static_cast<size_t>(groups), 0);
  for (const int64_t expert : topk_idx) {
    if (expert >= 0 && expert < groups) ++splits[static_cast<size_t>(expert)];
  }
  offsets.assign(1, 0);
  for (const int64_t split : splits) offsets.push_back(offsets.back() + split);
  capacity = offsets.back() + (random.percent(50) ? 0 : random.integer(1, 5));
  gather_idx.assign(static_cast<size_t>(capacity), -1);
  scatter_idx.assign(topk_idx.size(), -1);
  std::vector<int64_t> next = offsets;
  for (size_t i = 0; i < topk_idx.size(); ++i) {
    if (topk_idx[i] < 0 || topk_idx[i] >= groups) continue;
    const int64_t row = next[static_cast<size_t>(topk_idx[i])]++;
    scatter_idx[i] = row;
    gather_idx[static_cast<size_t>(row)] = static_cast<int64_t>(i) / choices;
  }
  int64_t placed = 0;
  for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
    const auto first = scatter_idx.begin() + static_cast<int64_t>(t) * choices;
    const bool is_sent = std::any_of(first, first + choices, [](int64_t row) { return row >= 0; });
    places.push_back(is_sent ? placed++ : -1);
  }
  main = static_cast<int32_t>(random.pick<int64_t>({MOIRE_FP32, MOIRE_BF16, MOIRE_FP16}));
  recipe = random.percent(50) ? 0 : static_cast<int32_t>(random.integer(1, 3));
  between = recipe == 0 ? main : int32_t{MOIRE_BF16};
  layout = static_cast<int32_t>(random.integer(0, 1));
  lists = random.percent(30);
  gathers = random.percent(40);
  gathers_grad_y = gathers && random.percent(50);
  transposes = random.percent(40);
  fp8_a = random.percent(35);
  fp8_b = random.percent(35);
  scaling = static_cast<int32_t>(recipe == 3 || random.percent(50) ? MOIRE_SCALING_FP8_BLOCK
                                                                   : MOIRE_SCALING_MXFP8);
  if (recipe == 1 || recipe == 2) scaling = MOIRE_SCALING_MXFP8;
  direction = static_cast<int32_t>(random.integer(0, 1));
  fractional = scaling == MOIRE_SCALING_FP8_BLOCK && random.percent(30) ? 1 : 0;
  kind = static_cast<int32_t>(random.integer(0, 2));
  const auto other = static_cast<int32_t>(random.integer(0, 3));
  from = random.percent(50) ? other : 0;
  to = from == 0 ? other : 0;
  is_weight = random.percent(30);
  saves_act = random.percent(40);
  has_groups = random.percent(80);
  hard = random.percent(15);
  is_gated = random.percent(75);
}

int64_t Plan::size(char letter, int64_t source_rows) const {
  switch (letter) {
    case 'C':
      return capacity;
    case 'S':
      return source_rows;
    case 'T':
      return tokens;
    case 'k':
      return choices;
    case 'G':
      return num_groups;
    case 'O':
      return num_groups + 1;
    case 'R':
      return 1;
    case 'E':
      return experts;
    case 'K':
      return k;
    case 'M':
      return m;
    case 'N':
      return n;
    case 'H':
      return h;
    case 'F':
      return f;
    case 'Z':
      return is_gated ? 2 * f : f;
    default:
      return 0;
  }
}

}  // namespace moire::fuzz
