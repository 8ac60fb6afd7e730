// What the routing tests share: index tensors of any shape, and the plan of a random choice.
#pragma once

#include <gtest/gtest.h>
#include <moire/routing.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "reference/tensor.h"
#include "tests/support/expect.h"
#include "tests/support/tensors.h"

namespace moire::test {

inline void set_index(TestTensor& t, int64_t row, int64_t column, int64_t value) {
  const TensorView view = t;
  const int64_t at = row * view.stride() + column;
  if (view.type() == DType::kInt32) {
    static_cast<int32_t*>(view.data)[at] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t*>(view.data)[at] = value;
  }
}

// The indices, at the front of more memory: a larger output can lie on them and on nothing else.
inline std::vector<std::byte> with_room(const TensorView& indices) {
  std::vector<std::byte> room(4096);
  std::memcpy(room.data(), indices.data, static_cast<size_t>(indices.num_bytes()));
  return room;
}

// [num_tokens, k] choices out of `num_groups`. Some are dropped (-1 and num_groups), some tokens
// choose an expert twice; the first is always routed, so that there are rows. No choice of
// `dropped_token` is.
inline TestTensor random_choices(Random& random, DType dtype, int64_t num_tokens, int64_t k,
                                 int64_t num_groups, int64_t padding = 0,
                                 int64_t dropped_token = -1) {
  TestTensor out(dtype, {num_tokens, k}, padding);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t j = 0; j < k; ++j) set_index(out, t, j, random.integer(-1, num_groups));
  }
  if (num_tokens > 0 && num_groups > 0) set_index(out, 0, 0, random.integer(0, num_groups - 1));
  for (int64_t j = 0; j < k && dropped_token >= 0; ++j) set_index(out, dropped_token, j, -1);
  return out;
}

// The plan of random choices, with `tail` rows more than are routed.
struct RandomPlan {
  RandomPlan(Random& random, int64_t num_tokens, int64_t k, int64_t num_groups, int64_t tail,
             DType dtype = DType::kInt32, int64_t dropped_token = -1)
      : topk_idx(random_choices(random, dtype, num_tokens, k, num_groups, 0, dropped_token)),
        offsets(DType::kInt64, {num_groups + 1}),
        scatter_idx(dtype, {num_tokens, k}) {
    int64_t routed = 0;
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t j = 0; j < k; ++j) {
        const int64_t expert = reference::read_index(topk_idx, t, j);
        routed += expert >= 0 && expert < num_groups;
      }
    }
    gather_idx = TestTensor(dtype, {routed + tail});
    PermutePlanArgs args;
    args.topk_idx = topk_idx;
    args.num_groups = num_groups;
    args.offsets = offsets;
    args.gather_idx = gather_idx;
    args.scatter_idx = scatter_idx;
    EXPECT_TRUE(succeeds(run(cpu(), args)));
    groups = Groups(offsets.as<int64_t>(), num_groups, routed + tail);
  }
  RandomPlan(const RandomPlan&) = delete;
  RandomPlan& operator=(const RandomPlan&) = delete;

  int64_t routed() const { return groups.offsets[groups.num_groups]; }

  TestTensor topk_idx, offsets, gather_idx, scatter_idx;
  Groups groups;
};

}  // namespace moire::test
