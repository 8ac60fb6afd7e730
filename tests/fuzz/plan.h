// What the fields of one drawn call have in common: sizes, groups, who goes where, formats.
#pragma once

#include <moire.h>

#include <cstdint>
#include <vector>

#include "tests/fuzz/random.h"

namespace moire::fuzz {

struct Plan {
  explicit Plan(Random& random);

  // The size that a letter of moire/fields.h stands for; 'S' is `source_rows`.
  int64_t size(char letter, int64_t source_rows) const;

  int64_t tokens, choices, num_groups, capacity, experts;
  int64_t k, m, n, h, f;
  std::vector<int64_t> topk_idx, splits, offsets, gather_idx, scatter_idx;
  std::vector<int64_t> places;  // of the one rank that a context without others has

  int32_t main, between;         // dtypes: of operands; of z, act and their gradients
  int32_t layout;                // of weights
  bool lists;                    // weights are lists
  bool gathers, gathers_grad_y;  // row_idx is there
  bool transposes;               // transpose_b
  bool fp8_a, fp8_b;             // operands of a GEMM are quantised
  int32_t recipe;                // 0 in half of the calls
  int32_t scaling, direction;    // of quantised tensors
  int32_t fractional;
  int32_t kind;      // of splits
  int32_t from, to;  // layouts of scales
  bool is_weight;    // a quantised source is one of weights
  bool saves_act;
  bool is_gated;    // FC1 has ups
  bool has_groups;  // where they may be absent
  bool hard;        // data has infinities and NaN
};

}  // namespace moire::fuzz
