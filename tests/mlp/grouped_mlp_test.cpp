// grouped_mlp forward and backward against the reference: the ragged table with every storage type,
// each option on its own, and random combinations of all of them.
#include <moire/grouped_mlp.h>

#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

constexpr DType kStorageTypes[] = {DType::kFP32, DType::kBF16, DType::kFP16};

class GroupedMlpRagged : public testing::TestWithParam<RaggedCase> {};

TEST_P(GroupedMlpRagged, MatchesTheReferenceInEveryStorageType) {
  Random random;
  for (const DType dtype : kStorageTypes) {
    MlpOptions options;
    options.ragged = GetParam();
    options.dtype = dtype;
    expect_mlp_is_right(tested(), options, random);
  }
}

TEST_P(GroupedMlpRagged, GathersRowsAndLeavesTheTailAlone) {
  Random random;
  for (const DType index_type : {DType::kInt32, DType::kInt64}) {
    MlpOptions options;
    options.ragged = GetParam();
    options.gathered = options.gathered_grad_y = true;
    options.index_type = index_type;
    options.tail = MOIRE_TAIL_UNTOUCHED;
    expect_mlp_is_right(tested(), options, random);
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GroupedMlpRagged, testing::ValuesIn(ragged_table()), case_name);

// Runs `change`d options over a few ragged cases and all storage types.
template <class Change>
void expect_right_with(const Change& change) {
  Random random;
  for (const RaggedCase& ragged : short_ragged_table()) {
    for (const DType dtype : kStorageTypes) {
      MlpOptions options;
      options.ragged = ragged;
      options.dtype = dtype;
      change(options);
      expect_mlp_is_right(tested(), options, random);
    }
  }
}

TEST(GroupedMlp, MatchesTheReferenceForEveryActivationAndLayout) {
  for (const Activation& activation : activations()) {
    for (const GluLayout& layout : glu_layouts()) {
      expect_right_with([&](MlpOptions& o) {
        o.activation = activation;
        o.layout = layout;
        o.width = 24;
      });
    }
  }
}

TEST(GroupedMlp, ClampsWhereTheLimitBites) {
  expect_right_with(
      [](MlpOptions& o) { o.activation = Activation::clamped_swiglu(0.5F, 1.702F, 1.0F); });
}

TEST(GroupedMlp, TakesEitherWeightLayoutPackedOrListed) {
  for (const bool listed : {false, true}) {
    for (const int32_t w1_layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      for (const int32_t w2_layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
        expect_right_with([&](MlpOptions& o) {
          o.listed = listed;
          o.w1_layout = w1_layout;
          o.w2_layout = w2_layout;
        });
      }
    }
  }
}

TEST(GroupedMlp, TakesBiasesAndProbsOrLeavesThemOut) {
  for (const bool b1 : {false, true}) {
    for (const bool b2 : {false, true}) {
      for (const bool probs : {false, true}) {
        expect_right_with([&](MlpOptions& o) {
          o.with_b1 = b1;
          o.with_b2 = b2;
          o.with_probs = probs;
        });
      }
    }
  }
}

TEST(GroupedMlp, ScalesB2ByProbsByNothingOrByATensorOfItsOwn) {
  for (const B2Scale b2_scale : kB2Scales) {
    for (const bool probs : {false, true}) {
      for (const bool gathered : {false, true}) {
        expect_right_with([&](MlpOptions& o) {
          o.b2_scale = b2_scale;
          o.with_probs = probs;
          o.gathered = o.gathered_grad_y = gathered;
          o.accumulate = gathered;
          o.tail = gathered ? MOIRE_TAIL_UNTOUCHED : MOIRE_TAIL_ZERO;
        });
      }
    }
  }
}

TEST(GroupedMlp, NeedNotReturnToWhereItBegan) {
  for (const int64_t out : {1, 8, 41, 136}) {
    for (const int32_t w2_layout : {MOIRE_OUT_IN, MOIRE_IN_OUT}) {
      expect_right_with([&](MlpOptions& o) {
        o.out = out;
        o.w2_layout = w2_layout;
        o.gathered = o.gathered_grad_y = w2_layout == MOIRE_IN_OUT;
      });
    }
  }
}

TEST(GroupedMlp, GathersXWithGradYInExpertOrder) {
  expect_right_with([](MlpOptions& o) { o.gathered = true; });
}

TEST(GroupedMlp, SavesActIfAsked) {
  expect_right_with([](MlpOptions& o) { o.saves_act = true; });
}

TEST(GroupedMlp, AccumulatesOrOverwritesGradientsOfEveryType) {
  for (const DType gradient_type : kStorageTypes) {
    for (const bool accumulate : {false, true}) {
      expect_right_with([&](MlpOptions& o) {
        o.gradient_type = gradient_type;
        o.accumulate = accumulate;
      });
    }
  }
}

TEST(GroupedMlp, AccumulatesPerGroup) {
  Random random;
  MlpOptions options;
  options.accumulate = true;
  const MlpProblem p(options, random);
  ASSERT_TRUE(succeeds(run(tested(), p.forward())));
  const uint8_t w1[] = {0, 1, 1, 0}, w2[] = {1, 0, 0, 1};
  GroupedMlpBackwardArgs args = p.backward();
  args.beta_w1_per_group = w1;
  args.beta_w2_per_group = w2;
  expect_right(tested(), args);
}

// Widths that no tile divides, and sums longer than one K block.
TEST(GroupedMlp, MatchesTheReferenceForShapesThatBreakTiles) {
  Random random;
  const struct {
    RaggedCase ragged;
    int64_t hidden, width;
  } shapes[] = {{{"Uneven", {7, 0, 18}}, 176, 96},  {{"Primes", {13, 1}}, 67, 41},
                {{"LongSums", {3, 2}}, 2880, 24},   {{"LongSums", {3, 2}}, 24, 1408},
                {{"LongRaggedSums", {600}}, 17, 8}, {{"OneColumn", {5, 3}}, 1, 1}};
  for (const auto& shape : shapes) {
    for (const DType dtype : kStorageTypes) {
      MlpOptions options;
      options.ragged = shape.ragged;
      options.hidden = shape.hidden;
      options.width = shape.width;
      options.dtype = dtype;
      expect_mlp_is_right(tested(), options, random);
    }
  }
}

MlpOptions random_options(Random& random) {
  const auto flip = [&] { return random.integer(0, 1) == 1; };
  const auto pick = [&](const auto& list) {
    return list[static_cast<size_t>(random.integer(0, static_cast<int64_t>(std::size(list)) - 1))];
  };
  const int32_t weight_layouts[] = {MOIRE_OUT_IN, MOIRE_IN_OUT};
  const DType index_types[] = {DType::kInt32, DType::kInt64};
  MlpOptions o;
  o.ragged.splits.clear();
  const int64_t num_groups = random.integer(0, 6);
  for (int64_t g = 0; g < num_groups; ++g) {
    o.ragged.splits.push_back(flip() ? 0 : random.integer(1, 40));
  }
  o.ragged.tail = random.integer(0, 2);
  o.hidden = random.integer(1, 70);
  if (flip()) o.out = random.integer(1, 70);
  o.width = 8 * random.integer(1, 6);
  o.dtype = pick(kStorageTypes);
  o.gradient_type = pick(kStorageTypes);
  o.index_type = pick(index_types);
  o.activation = pick(activations());
  o.layout = pick(glu_layouts());
  o.w1_layout = pick(weight_layouts);
  o.w2_layout = pick(weight_layouts);
  o.listed = flip();
  o.with_b1 = flip();
  o.with_b2 = flip();
  o.with_probs = flip();
  o.b2_scale = pick(kB2Scales);
  o.gathered = flip();
  o.gathered_grad_y = o.gathered && flip();
  o.accumulate = flip();
  o.saves_act = flip();
  o.tail = flip() ? MOIRE_TAIL_ZERO : MOIRE_TAIL_UNTOUCHED;
  return o;
}

TEST(GroupedMlp, MatchesTheReferenceForRandomCombinations) {
  Random random;
  for (int i = 0; i < 100; ++i) expect_mlp_is_right(tested(), random_options(random), random);
}

}  // namespace
}  // namespace moire::test
