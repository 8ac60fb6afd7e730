// Prepared weights and their memory, for tests of what is given them.
#pragma once

#include <moire/buffer.h>
#include <moire/quantize.h>

#include <memory>

#include "tests/mlp/recipe_cases.h"
#include "tests/support/expect.h"

namespace moire::test {

// What stands for a weight in a call.
struct Prepared {
  moire_prepared_weight weight{};
  std::shared_ptr<Buffer> memory;

  operator moire_prepared_weight() const { return weight; }
};

inline PrepareWeightArgs prepare_args(const RecipeCase& c, const moire_weight& w) {
  PrepareWeightArgs args;
  args.w = w;
  args.recipe = c.recipe;
  args.fractional_scales = c.fractional_scales;
  return args;
}

// By the device under test, or another; memory that was not written is not zero.
inline Prepared prepare(PrepareWeightArgs args, const Tested& device = tested()) {
  Prepared out;
  EXPECT_TRUE(succeeds(prepare_weight_form(device.context(), args, &out.weight)));
  const auto bytes = static_cast<size_t>(out.weight.memory.shape[0]);
  out.memory = std::make_shared<Buffer>(bytes);
  std::fill_n(static_cast<unsigned char*>(out.memory->data()), bytes, 0xFF);
  out.weight.memory.data = out.memory->data();
  args.prepared = out.weight;
  EXPECT_TRUE(succeeds(run(device, args)));
  return out;
}

}  // namespace moire::test
