// Every argument of grouped_mlp and grouped_mlp_backward, wrong in each way: the sentence says what
// was found and what was needed, and no output is touched.
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "tests/mlp/mlp_checks.h"

namespace moire::test {
namespace {

// H = N = 12, F = 8, 4 groups, 10 rows of a capacity of 11; bf16 so that fp32 is wrong.
MlpOptions bf16_options() {
  MlpOptions options;
  options.dtype = DType::kBF16;
  options.saves_act = true;
  options.b2_scale = B2Scale::kOwn;
  return options;
}

template <class A>
struct BadInput {
  std::string name;  // of the test
  std::function<void(A&)> spoil;
  std::string message;
};

// The ways in which every tensor can be wrong, for the member `tensor` of A that is called `name`
// and must be `needs` = "[capacity, H] = [11, 12]".
template <class A>
void add_tensor(std::vector<BadInput<A>>& table, moire_tensor A::*tensor, const std::string& name,
                const std::string& needs, const std::string& dtypes = "fp32, bf16 or fp16") {
  const auto add = [&](const std::string& what, auto spoil, const std::string& message) {
    table.push_back({name + what, [=](A& args) { spoil(args.*tensor); }, message});
  };
  add(
      "_dtype", [](moire_tensor& t) { t.dtype = MOIRE_E4M3; }, ", needs " + dtypes);
  add(
      "_dtype_found", [](moire_tensor& t) { t.dtype = MOIRE_E4M3; }, name + " is e4m3 [");
  add(
      "_wide", [](moire_tensor& t) { ++t.shape[t.rank - 1]; }, ", needs " + needs);
  add(
      "_rank", [](moire_tensor& t) { t.rank = 3, t.shape[2] = 1; }, name + " is ");
  add(
      "_null", [](moire_tensor& t) { t.data = nullptr; }, "but its data pointer is null");
  add(
      "_unaligned", [](moire_tensor& t) { t.data = static_cast<char*>(t.data) + 1; },
      "but its data pointer is not aligned to its");
}

template <class A>
void add_weight(std::vector<BadInput<A>>& table, moire_weight A::*weight, const std::string& name,
                const std::string& needs) {
  const auto add = [&](const std::string& what, auto spoil, const std::string& message) {
    table.push_back({name + what, [=](A& args) { spoil(args.*weight); }, message});
  };
  add(
      "_dtype", [](moire_weight& w) { w.tensor.dtype = MOIRE_INT32; },
      ", needs fp32, bf16 or fp16");
  add(
      "_groups", [](moire_weight& w) { w.tensor.shape[0] = 5; }, ", needs " + needs);
  add(
      "_rank", [](moire_weight& w) { w.tensor.rank = 2; }, ", needs ");
  add(
      "_layout", [](moire_weight& w) { w.layout = 2; }, name + ".layout is 2, must be 0 to 1");
  add(
      "_null", [](moire_weight& w) { w.tensor.data = nullptr; }, "but its data pointer is null");
  static const void* const null_matrices[4] = {};
  add(
      "_both", [](moire_weight& w) { w.list = null_matrices; },
      name + " has both packed data and a list");
  add(
      "_list", [](moire_weight& w) { w.tensor.data = nullptr, w.list = null_matrices; },
      name + "[0] of the list is null");
  add(
      "_list_stride",
      [](moire_weight& w) {
        w.tensor.data = nullptr, w.list = null_matrices;
        w.tensor.row_stride = w.tensor.shape[2] + 1;
      },
      name + " is a list of matrices with row stride ");
}

// What both ops have: groups, activation, layout, recipe, tail.
template <class A>
void add_common(std::vector<BadInput<A>>& table) {
  static const int64_t late[] = {1, 3, 3, 8, 10}, decreasing[] = {0, 3, 2, 8, 10},
                       past[] = {0, 3, 3, 8, 12};
  const auto add = [&](const std::string& name, std::function<void(A&)> spoil,
                       const std::string& message) {
    table.push_back({name, std::move(spoil), message});
  };
  add(
      "num_groups", [](A& a) { a.groups.num_groups = -1; },
      "groups.num_groups is -1, must not be negative");
  add(
      "many_groups", [](A& a) { a.groups.num_groups = (int64_t{1} << 30) + 1; },
      "groups.num_groups is 1073741825, must be at most 2^30");
  add(
      "capacity", [](A& a) { a.groups.capacity = -1; },
      "groups.capacity is -1, must not be negative");
  add(
      "offsets_null", [](A& a) { a.groups.offsets = nullptr; },
      "groups.offsets is null but there are 4 groups");
  add(
      "offsets_first", [](A& a) { a.groups.offsets = late; }, "groups.offsets[0] is 1, must be 0");
  add(
      "offsets_decreasing", [](A& a) { a.groups.offsets = decreasing; },
      "group 1 has offsets 3 to 2, must not decrease");
  add(
      "offsets_past", [](A& a) { a.groups.offsets = past; },
      "group 3 ends at row 12, past the capacity 11");
  add(
      "recipe", [](A& a) { a.recipe = 4; }, "recipe is 4, must be 0 to 3");
  add(
      "tail", [](A& a) { a.tail = 2; }, "tail is 2, must be 0 to 1");
  add(
      "b2_unscaled", [](A& a) { a.b2_unscaled = 2; }, "b2_unscaled is 2, must be 0 to 1");
  add(
      "activation_kind", [](A& a) { a.activation.kind = 9; },
      "activation.kind is 9, must be 0 to ");
  add(
      "activation_limit",
      [](A& a) {
        a.activation = {MOIRE_CLAMPED_SWIGLU, 0, 1, 1};
      },
      "activation.limit is 0, must be positive (GPT-OSS uses 7)");
  add(
      "activation_alpha",
      [](A& a) {
        a.activation = {MOIRE_CLAMPED_SWIGLU, 7, -1, 1};
      },
      "activation.alpha is -1, must be positive and finite (GPT-OSS uses 1.702)");
  add(
      "activation_offset",
      [](A& a) {
        a.activation = {MOIRE_CLAMPED_SWIGLU, 7, 1, std::numeric_limits<float>::quiet_NaN()};
      },
      "activation.offset is nan, must be finite");
  add(
      "layout_order", [](A& a) { a.layout.order = 3; }, "layout.order is 3, must be 0 to 2");
  add(
      "layout_negative", [](A& a) { a.layout.block = -1; },
      "layout.block is -1, must divide F = 8 (0: F)");
  add(
      "layout_block", [](A& a) { a.layout.block = 3; },
      "layout.block is 3, must divide F = 8 (0: F)");
}

std::vector<BadInput<moire_grouped_mlp_args>> bad_forwards() {
  using A = moire_grouped_mlp_args;
  std::vector<BadInput<A>> table;
  add_common(table);
  add_tensor(table, &A::x, "x", "[capacity, H] = [11, 12]");
  add_weight(table, &A::w1, "w1", "[G, 2F, H] = [4, 16, 12]");
  add_tensor(table, &A::b1, "b1", "[G, 2F] = [4, 16]");
  add_weight(table, &A::w2, "w2", "[G, N, F] = [4, 12, 8]");
  add_tensor(table, &A::b2, "b2", "[G, N] = [4, 12]");
  add_tensor(table, &A::probs, "probs", "[capacity] = [11]", "fp32");
  add_tensor(table, &A::z, "z", "[capacity, 2F] = [11, 16]");
  add_tensor(table, &A::act, "act", "[capacity, F] = [11, 8]");
  add_tensor(table, &A::y, "y", "[capacity, N] = [11, 12]");
  add_tensor(table, &A::b2_scale, "b2_scale", "[capacity] = [11]", "fp32");
  const char* const no_use =
      "b2_scale is present but b2 is absent or b2_unscaled is 1: it would scale nothing";
  table.push_back({"b2_scale_of_nothing", [](A& a) { a.b2 = {}; }, no_use});
  table.push_back({"b2_scale_not_used", [](A& a) { a.b2_unscaled = 1; }, no_use});
  table.push_back({"x_absent", [](A& a) { a.x = {}; },
                   "x is absent, needs fp32, bf16 or fp16 [capacity, H] = [11, 12]"});
  table.push_back({"w1_absent", [](A& a) { a.w1 = {}; }, "w1 is absent, needs"});
  const auto wide = [&](const std::string& name, moire_weight A::*w, int dim, const char* needs) {
    table.push_back({name, [=](A& a) { ++(a.*w).tensor.shape[dim]; }, needs});
    table.push_back({name + "_alone",  // nothing saved that could settle what F is
                     [=](A& a) { a.act = a.z = a.b1 = {}, ++(a.*w).tensor.shape[dim]; }, needs});
  };
  wide("w1_2f", &A::w1, 1, "w1 is bf16 [4, 17, 12], needs [G, 2F, H] = [4, 16, 12]");
  wide("w1_h", &A::w1, 2, "w1 is bf16 [4, 16, 13], needs [G, 2F, H] = [4, 16, 12]");
  wide("w2_h", &A::w2, 1, "w2 is bf16 [4, 13, 8], needs [G, N, F] = [4, 12, 8]");
  wide("w2_f", &A::w2, 2, "w2 is bf16 [4, 12, 9], needs [G, N, F] = [4, 12, 8]");
  table.push_back({"w1_2f_even", [](A& a) { a.w1.tensor.shape[1] = 18; },
                   "w1 is bf16 [4, 18, 12], needs [G, 2F, H] = [4, 16, 12]"});
  table.push_back({"offsets_misaligned",
                   [](A& a) {
                     static const int32_t memory[16] = {};
                     a.groups.offsets = reinterpret_cast<const int64_t*>(
                         reinterpret_cast<uintptr_t>(memory) % 8 == 0 ? memory + 1 : memory);
                   },
                   "groups.offsets is not aligned to its 8-byte elements"});
  table.push_back({"y_absent", [](A& a) { a.y = {}; }, "y is absent, needs"});
  table.push_back({"y_is_x", [](A& a) { a.y.data = a.x.data; },
                   "y and x overlap in their address ranges, must be apart"});
  table.push_back({"z_is_w1", [](A& a) { a.z.data = a.w1.tensor.data; },
                   "z and w1 overlap in their address ranges, must be apart"});
  table.push_back({"mixed", [](A& a) { a.x.dtype = MOIRE_FP16; },
                   "x is fp16 [11, 12] but w1 is bf16 [4, 16, 12]: the dtypes must be equal"});
  table.push_back({"y_dtype", [](A& a) { a.y.dtype = MOIRE_FP16; },
                   "y is fp16 [11, 12] but x is bf16 [11, 12]: the dtypes must be equal"});
  table.push_back(
      {"overlapping_rows", [](A& a) { a.x.row_stride = 5; }, "rows of 12 elements overlap"});
  return table;
}

std::vector<BadInput<moire_grouped_mlp_backward_args>> bad_backwards() {
  using A = moire_grouped_mlp_backward_args;
  std::vector<BadInput<A>> table;
  add_common(table);
  add_tensor(table, &A::x, "x", "[capacity, H] = [11, 12]");
  add_weight(table, &A::w1, "w1", "[G, 2F, H] = [4, 16, 12]");
  add_weight(table, &A::w2, "w2", "[G, N, F] = [4, 12, 8]");
  add_tensor(table, &A::b2, "b2", "[G, N] = [4, 12]");
  add_tensor(table, &A::probs, "probs", "[capacity] = [11]", "fp32");
  add_tensor(table, &A::z, "z", "[capacity, 2F] = [11, 16]");
  add_tensor(table, &A::act, "act", "[capacity, F] = [11, 8]");
  add_tensor(table, &A::grad_x, "grad_x", "[capacity, H] = [11, 12]");
  add_weight(table, &A::grad_w1, "grad_w1", "[G, 2F, H] = [4, 16, 12]");
  add_tensor(table, &A::grad_b1, "grad_b1", "[G, 2F] = [4, 16]");
  add_weight(table, &A::grad_w2, "grad_w2", "[G, N, F] = [4, 12, 8]");
  add_tensor(table, &A::grad_b2, "grad_b2", "[G, N] = [4, 12]");
  add_tensor(table, &A::grad_probs, "grad_probs", "[capacity] = [11]", "fp32");
  add_tensor(table, &A::b2_scale, "b2_scale", "[capacity] = [11]", "fp32");
  add_tensor(table, &A::grad_b2_scale, "grad_b2_scale", "[capacity] = [11]", "fp32");
  table.push_back({"b2_scale_not_used", [](A& a) { a.b2_unscaled = 1; },
                   "b2_scale is present but b2_unscaled is 1: it would scale nothing"});
  table.push_back({"b2_scale_absent", [](A& a) { a.b2_scale = {}; },
                   "grad_b2_scale is present but b2_scale is absent"});
  table.push_back({"b2_absent", [](A& a) { a.b2 = {}; }, "b2 is absent, needs"});
  table.push_back({"grad_b2_scale_is_grad_probs", [](A& a) { a.grad_b2_scale = a.grad_probs; },
                   "grad_b2_scale and grad_probs overlap in their address ranges, must be apart"});
  table.push_back({"z_absent", [](A& a) { a.z = {}; }, "z is absent, needs"});
  table.push_back({"grad_y_absent", [](A& a) { a.grad_y = {}; }, "grad_y is absent, needs"});
  table.push_back({"b2_absent_is_fine_but_not_its_shape", [](A& a) { a.b2.shape[0] = 3; },
                   "b2 is bf16 [3, 12], needs [G, N] = [4, 12]"});
  table.push_back({"grad_y_rows", [](A& a) { a.grad_y.shape[0] = 10; },
                   "grad_y is bf16 [10, 12], needs [capacity, N] = [11, 12]"});
  table.push_back({"gathered", [](A& a) { a.gathered_grad_y = 1; },
                   "gathered_grad_y is 1 but row_idx is absent"});
  table.push_back({"act_absent", [](A& a) { a.act = {}; }, "act_is_saved is 1 but act is absent"});
  table.push_back(
      {"act_is_saved", [](A& a) { a.act_is_saved = 2; }, "act_is_saved is 2, must be 0 to 1"});
  table.push_back({"grad_y_dtype", [](A& a) { a.grad_y.dtype = MOIRE_UINT8; },
                   "grad_y is uint8 [11, 12], needs fp32, bf16 or fp16"});
  table.push_back({"grad_y_other", [](A& a) { a.grad_y.dtype = MOIRE_FP16; },
                   "grad_y is fp16 [11, 12] but z is bf16 [11, 16]: the dtypes must be equal"});
  table.push_back(
      {"grad_y_null", [](A& a) { a.grad_y.data = nullptr; }, "but its data pointer is null"});
  table.push_back({"beta_w1", [](A& a) { a.beta_w1 = 2; }, "beta_w1 is 2, must be 0 to 1"});
  table.push_back({"beta_w2", [](A& a) { a.beta_w2 = -1; }, "beta_w2 is -1, must be 0 to 1"});
  table.push_back({"beta_bias", [](A& a) { a.beta_bias = 7; }, "beta_bias is 7, must be 0 to 1"});
  table.push_back({"grad_x_is_grad_y", [](A& a) { a.grad_x.data = a.grad_y.data; },
                   "grad_x and grad_y overlap in their address ranges, must be apart"});
  table.push_back({"grad_w1_is_w1",  // all of it: an FP32 one would reach past w1
                   [](A& a) { a.grad_w1.tensor = a.w1.tensor; },
                   "grad_w1 and w1 overlap in their address ranges, must be apart"});
  return table;
}

TEST(GroupedMlpBadInput, IsRefusedWithASentenceBeforeAnythingIsWritten) {
  Random random;
  const MlpProblem p(bf16_options(), random);
  const MlpProblem before = p;
  for (const auto& bad : bad_forwards()) {
    SCOPED_TRACE(bad.name);
    GroupedMlpArgs args = p.forward();
    const TestWorkspace workspace(1 << 16);
    args.workspace = workspace.get();
    bad.spoil(args);
    const Status status = grouped_mlp(cpu(), args);
    EXPECT_TRUE(fails(status, Code::kInvalidArgument, bad.message));
    EXPECT_EQ(status.message().rfind("grouped_mlp: ", 0), 0U) << status.message();
    EXPECT_TRUE(same_outputs(p.forward(), before.forward()));
  }
}

TEST(GroupedMlpBackwardBadInput, IsRefusedWithASentenceBeforeAnythingIsWritten) {
  Random random;
  const MlpProblem p(bf16_options(), random);
  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  const MlpProblem before = p;
  for (const auto& bad : bad_backwards()) {
    SCOPED_TRACE(bad.name);
    GroupedMlpBackwardArgs args = p.backward();
    const TestWorkspace workspace(1 << 16);
    args.workspace = workspace.get();
    bad.spoil(args);
    const Status status = grouped_mlp_backward(cpu(), args);
    EXPECT_TRUE(fails(status, Code::kInvalidArgument, bad.message));
    EXPECT_EQ(status.message().rfind("grouped_mlp_backward: ", 0), 0U) << status.message();
    EXPECT_TRUE(same_outputs(p.backward(), before.backward()));
  }
}

TEST(GroupedMlpBadInput, AGatheredRowOutOfRangeIsNamed) {
  Random random;
  MlpOptions options;
  options.gathered = true;
  for (const int64_t bad : {-1, 6}) {
    MlpProblem p(options, random);
    p.row_idx.as<int64_t>()[4] = bad;
    EXPECT_TRUE(fails(run(cpu(), p.forward()), Code::kInvalidArgument,
                      "row_idx[4] is " + std::to_string(bad) + ", must be 0 to 5"));
  }
}

TEST(GroupedMlpBadInput, RowIdxOfAnotherKindOrLengthIsNamed) {
  Random random;
  MlpOptions options;
  options.gathered = options.gathered_grad_y = true;
  const MlpProblem p(options, random);
  ASSERT_TRUE(succeeds(run(cpu(), p.forward())));
  const std::pair<std::function<void(moire_tensor&)>, const char*> wrong[] = {
      {[](moire_tensor& t) { t.dtype = MOIRE_FP32; }, "row_idx is fp32 [11], needs int32 or int64"},
      {[](moire_tensor& t) { t.shape[0] = 10; }, "row_idx is int64 [10], needs [capacity] = [11]"},
      {[](moire_tensor& t) { t.data = nullptr; }, "row_idx is int64 [11] but its data pointer is"},
  };
  for (const auto& [spoil, message] : wrong) {
    GroupedMlpArgs forward = p.forward();
    GroupedMlpBackwardArgs backward = p.backward();
    spoil(forward.row_idx);
    spoil(backward.row_idx);
    EXPECT_TRUE(fails(run(cpu(), forward), Code::kInvalidArgument, message));
    EXPECT_TRUE(fails(run(cpu(), backward), Code::kInvalidArgument, message));
  }
}

TEST(GroupedMlpBadInput, ANonsenseIndexInTheTailIsNotRead) {
  Random random;
  MlpOptions options;
  options.gathered = true;
  MlpProblem p(options, random);
  p.row_idx.as<int64_t>()[10] = 1'000'000'000;
  EXPECT_TRUE(succeeds(run(cpu(), p.forward())));
}

// As FP8 tensor cores read them, which a CPU has not: 128 * (11 div 128 + 4) columns.
TEST(GroupedMlpBadInput, TransposedColumnsOfXAreForFp8TensorCores) {
  Random random;
  const MlpProblem p(bf16_options(), random);
  const TestTensor codes(DType::kE4M3, {12, 512}), scales(DType::kFP32, {4, 12});
  for (const int32_t recipe :
       {MOIRE_RECIPE_MXFP8, MOIRE_RECIPE_MXFP8_FAST, MOIRE_RECIPE_FP8_BLOCK}) {
    GroupedMlpArgs args = p.forward();
    args.recipe = recipe;
    args.x_columnwise = {codes, scales};
    const std::string found = "x_columnwise.data is e4m3 [12, 512], ";
    EXPECT_TRUE(fails(run(cpu(), args), Code::kInvalidArgument,
                      found + (recipe == MOIRE_RECIPE_MXFP8
                                   ? "needs [capacity, k] = [11, 12]"
                                   : "which is transposed: needs contiguous rows, on a GPU")));
  }
}

}  // namespace
}  // namespace moire::test
