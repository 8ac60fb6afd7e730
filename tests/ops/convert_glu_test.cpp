// convert_glu, interleave_glu and deinterleave_glu against the reference, byte for byte.
#include <gtest/gtest.h>
#include <moire/glu.h>

#include <cstring>

#include "reference/glu.h"
#include "tests/support/expect.h"

namespace moire::test {
namespace {

constexpr DType kBySize[] = {DType::kE4M3, DType::kBF16, DType::kFP32, DType::kFP64};

void randomize_bytes(Random& random, const TestTensor& tensor) {
  const TensorView t = tensor.view();
  const auto row_bytes = static_cast<size_t>(t.columns() * dtype_size(t.type()));
  for (int64_t row = 0; row < t.num_rows(); ++row) {
    auto* bytes = static_cast<unsigned char*>(t.data) + row * t.stride() * dtype_size(t.type());
    for (size_t i = 0; i < row_bytes; ++i) {
      bytes[i] = static_cast<unsigned char>(random.integer(0, 255));
    }
  }
}

// The elements of a view, without its padding.
std::vector<std::byte> bytes_of(const TensorView& t) {
  const auto row_bytes = static_cast<size_t>(t.columns() * dtype_size(t.type()));
  std::vector<std::byte> out(row_bytes * static_cast<size_t>(t.num_rows()));
  if (out.empty()) return out;  // memcpy takes no null pointer, not even for 0 bytes
  for (int64_t row = 0; row < t.num_rows(); ++row) {
    const auto* from = static_cast<std::byte*>(t.data) + row * t.stride() * dtype_size(t.type());
    std::memcpy(out.data() + static_cast<size_t>(row) * row_bytes, from, row_bytes);
  }
  return out;
}

std::vector<GluLayout> layouts(int64_t f) {
  std::vector<GluLayout> out;
  for (const int32_t order : {MOIRE_GATE_FIRST, MOIRE_UP_FIRST}) {
    for (const int64_t block : {0, 1, 2, 3, 8, 12, 32, 96}) {
      if (block == 0 || f % block == 0) out.push_back(GluLayout::interleaved(block, order));
    }
  }
  return out;
}

struct Shape {
  std::initializer_list<int64_t> sizes;
  int dim;
  int64_t padding;
};

// Every pair of layouts; then back, which must give the source again.
void check_shape(const Tested& context, Random& random, const Shape& shape, DType dtype,
                 const std::vector<GluLayout>& tried) {
  TestTensor source(dtype, shape.sizes, shape.padding);
  TestTensor target(dtype, shape.sizes, shape.padding == 0 ? 0 : shape.padding + 2);
  TestTensor back(dtype, shape.sizes, shape.padding);
  randomize_bytes(random, source);
  ConvertGluArgs args;
  args.source = source;
  args.target = target;
  args.dim = shape.dim;
  for (const GluLayout& from : tried) {
    for (const GluLayout& to : tried) {
      SCOPED_TRACE(testing::Message()
                   << to_string(source.view()) << " dim " << shape.dim << " from " << from.block
                   << "/" << from.order << " to " << to.block << "/" << to.order);
      args.from = from;
      args.to = to;
      target.poison();
      ASSERT_TRUE(succeeds(convert_glu(context, args)));
      ASSERT_TRUE(bytes_of(target) == reference::convert_glu(args));
      ConvertGluArgs inverse = args;
      inverse.source = target;
      inverse.target = back;
      inverse.from = to;
      inverse.to = from;
      back.poison();
      ASSERT_TRUE(succeeds(convert_glu(context, inverse)));
      ASSERT_TRUE(bytes_of(back) == bytes_of(source));
    }
  }
  EXPECT_TRUE(source.is_undamaged() && target.is_undamaged() && back.is_undamaged());
}

TEST(ConvertGlu, MovesEveryShapeDimAndElementSizeBetweenAllLayouts) {
  Random random;
  const Tested context = tested(2);
  const Shape shapes[] = {
      {{192}, 0, 0},        // a bias
      {{5, 192}, 1, 0},     // biases of experts
      {{3, 48}, 1, 5},      // the same, strided
      {{192, 7}, 0, 0},     // a weight with short rows
      {{48, 80}, 0, 3},     // a strided weight
      {{3, 24, 40}, 1, 0},  // packed weights
      {{2, 24, 6}, 1, 2},   // strided
      {{24, 3, 10}, 0, 0},  // positions of several rows
      {{24, 3, 10}, 0, 1},  // which are strided
      {{2, 5, 96}, 2, 0},   // [G, in, out]
      {{2, 3, 24}, 2, 4},   //
      {{2, 1}, 0, 0},       // F = 1
      {{0, 8}, 1, 0},       // empty
      {{4, 0}, 0, 0},       //
      {{0}, 0, 0},          //
  };
  for (const Shape& shape : shapes) {
    const int64_t f = std::data(shape.sizes)[shape.dim] / 2;
    for (const DType dtype : kBySize) check_shape(context, random, shape, dtype, layouts(f));
  }
}

TEST(ConvertGlu, SplitsLongRowsAndManyRowsOverAnyNumberOfThreads) {
  Random random;
  const std::vector<GluLayout> few = {GluLayout::halves(), GluLayout::interleaved(1),
                                      GluLayout::interleaved(8, MOIRE_UP_FIRST)};
  for (const int threads : {1, 3, 7}) {
    const Context context = cpu(threads);
    check_shape(context, random, {{288 * 1024}, 0, 0}, DType::kBF16, few);
    check_shape(context, random, {{3000, 96}, 1, 0}, DType::kBF16, few);
  }
}

// From 8 MiB on, stores bypass the cache: the same bytes, for rows of odd lengths at odd addresses.
TEST(ConvertGlu, MovesLargeTensorsPastTheCache) {
  struct Conversion {
    int64_t from, to;
  };
  const auto check = [](const Shape& shape, const std::vector<Conversion>& conversions) {
    TestTensor source(DType::kBF16, shape.sizes, shape.padding);
    TestTensor target(DType::kBF16, shape.sizes, shape.padding);
    const TensorView view = source.view();
    for (int64_t row = 0; row < view.num_rows(); ++row) {
      auto* elements = static_cast<uint16_t*>(view.data) + row * view.stride();
      for (int64_t j = 0; j < view.columns(); ++j) {
        elements[j] = static_cast<uint16_t>(row * 31 + j);
      }
    }
    ConvertGluArgs args;
    args.source = source;
    args.target = target;
    args.dim = shape.dim;
    for (const Conversion& c : conversions) {
      args.from = GluLayout::interleaved(c.from);
      args.to = GluLayout::interleaved(c.to, MOIRE_UP_FIRST);
      target.poison();
      ASSERT_TRUE(succeeds(convert_glu(tested(2), args)));
      EXPECT_TRUE(bytes_of(target) == reference::convert_glu(args)) << c.from << " to " << c.to;
      EXPECT_TRUE(target.is_undamaged());
    }
  };
  check({{3072, 1501}, 0, 0}, {{0, 1}, {0, 0}});
  check({{3072, 1501}, 0, 3}, {{32, 0}});
  check({{1500, 3072}, 1, 0}, {{0, 1}, {1, 0}, {0, 8}, {32, 0}, {1, 8}});
  check({{1500, 3072}, 1, 3}, {{0, 1}, {1, 0}, {8, 0}});
}

TEST(InterleaveGlu, IsHalvesToBlocksAndDeinterleaveItsInverse) {
  Random random;
  TestTensor source(DType::kFP16, {2, 48, 5}), blocks(DType::kFP16, {2, 48, 5}), back = blocks;
  randomize_bytes(random, source);
  for (const int64_t block : {1, 2, 3, 4, 6, 8, 12, 24}) {
    ASSERT_TRUE(succeeds(interleave_glu(cpu(), source, blocks, block, 1)));
    ConvertGluArgs args;
    args.source = source;
    args.target = blocks;
    args.dim = 1;
    args.to = GluLayout::interleaved(block);
    EXPECT_TRUE(bytes_of(blocks) == reference::convert_glu(args));
    ASSERT_TRUE(succeeds(deinterleave_glu(cpu(), blocks, back, block, 1)));
    EXPECT_TRUE(bytes_of(back) == bytes_of(source));
  }
}

// Swapping gate and up, or forgetting to convert, does not go unnoticed.
TEST(ConvertGlu, AWrongLayoutIsDetected) {
  Random random;
  TestTensor source(DType::kBF16, {64, 9}), target(DType::kBF16, {64, 9});
  randomize_bytes(random, source);
  ASSERT_TRUE(succeeds(interleave_glu(cpu(), source, target, 8)));
  ConvertGluArgs args;
  args.source = source;
  args.target = target;
  for (const GluLayout& wrong :
       {GluLayout::halves(), GluLayout::interleaved(1), GluLayout::interleaved(16),
        GluLayout::interleaved(8, MOIRE_UP_FIRST)}) {
    args.to = wrong;
    EXPECT_FALSE(bytes_of(target) == reference::convert_glu(args));
  }
}

using Blocks = Status (*)(const Context&, const TensorView&, const TensorView&, int64_t, int);

TEST(InterleaveGlu, ValidatesTheSameInBothDirections) {
  const TestTensor a(DType::kBF16, {12, 10}), b(DType::kBF16, {12, 10}), c(DType::kBF16, {12, 8});
  const TestTensor other(DType::kFP16, {12, 10}), indices(DType::kNone, {});
  for (const auto& [name, op] :
       {std::pair<std::string, Blocks>{"interleave_glu", interleave_glu},
        std::pair<std::string, Blocks>{"deinterleave_glu", deinterleave_glu}}) {
    const Context context = cpu();
    const auto expect = [&](const Status& status, const std::string& text) {
      EXPECT_TRUE(fails(status, Code::kInvalidArgument, name + ": " + text));
      EXPECT_TRUE(same_bits(b, TestTensor(DType::kBF16, {12, 10})));
    };
    expect(op(context, a, b, 0, 0), "block is 0, must be a positive integer");
    expect(op(context, a, b, -4, 0), "block is -4, must be a positive integer");
    expect(op(context, a, b, 4, 2), "dim is 2, must be 0 to 1");
    expect(op(context, a, b, 4, -1), "dim is -1, must be 0 to 1");
    expect(op(context, a, b, 4, 0), "source has 12 along dim 0, needs a multiple of 2 * block = 8");
    expect(op(context, a, b, 2, 1), "source has 10 along dim 1, needs a multiple of 2 * block = 4");
    expect(op(context, a, c, 2, 0),
           "source is bf16 [12, 10] but target is bf16 [12, 8]: the shapes");
    expect(op(context, a, other, 2, 0),
           "source is bf16 [12, 10] but target is fp16 [12, 10]: the dtypes");
    expect(op(context, b, b, 2, 0),
           "target and source overlap in their address ranges, must be apart");
    expect(op(context, {}, b, 2, 0), "source has rank 0, needs rank 1 to 3");
    expect(op(context, a, {}, 2, 0), "target is absent, needs");
    EXPECT_TRUE(succeeds(op(context.explaining(), a, b, 6, 0)));
  }
}

TEST(ConvertGlu, NamesTheLayoutThatDoesNotFit) {
  const TestTensor a(DType::kBF16, {12}), b(DType::kBF16, {12});
  ConvertGluArgs args;
  args.source = a;
  args.target = b;
  args.from = GluLayout::interleaved(3);
  args.to = GluLayout::interleaved(4);
  const auto expect = [&](const std::string& text) {
    EXPECT_TRUE(fails(convert_glu(cpu(), args), Code::kInvalidArgument, "convert_glu: " + text));
  };
  expect("source has 12 along dim 0, needs a multiple of 2 * block = 8");
  args.to = GluLayout::interleaved(-2);
  expect("to.block is -2, must be a positive integer, or 0 (halves)");
  args.from.order = 5;
  expect("from.order is 5, must be 0 to 1");
  args.from = GluLayout::ungated();
  expect("from.order is 2 (ungated), which has no halves to move");
}

TEST(ConvertGlu, RefusesAnOddNumberOfRows) {
  const TestTensor a(DType::kBF16, {7, 4}), b(DType::kBF16, {7, 4});
  ConvertGluArgs args;
  args.source = a;
  args.target = b;
  EXPECT_TRUE(fails(convert_glu(cpu(), args), Code::kInvalidArgument,
                    "source has 7 along dim 0, needs a multiple of 2 * block = 2"));
}

}  // namespace
}  // namespace moire::test
