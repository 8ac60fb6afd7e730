#include "random_problem.h"

#include <algorithm>

#include "random.h"

namespace moire::tool {
namespace {

// Around the widths of vectors and tiles, where kernels change their minds.
constexpr int64_t kEdges[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129};

const auto& pick(Random& random, const auto& values) {
  return values[static_cast<size_t>(random.below(static_cast<int64_t>(std::size(values))))];
}

// Small mostly, at an edge often, a few large.
int64_t draw_size(Random& random, int64_t largest) {
  int64_t size = 1 + random.below(48);
  if (random.chance(0.4)) size = pick(random, kEdges);
  if (random.chance(0.05)) size = 1 + random.below(largest);
  return std::min(size, largest);
}

Splits draw_splits(Random& random, int64_t groups) {
  Splits s;
  const double u = random.uniform();
  s.kind = u < 0.6    ? Splits::Kind::kRagged
           : u < 0.75 ? Splits::Kind::kZipf
           : u < 0.9  ? Splits::Kind::kOneHot
                      : Splits::Kind::kUniform;
  if (s.kind == Splits::Kind::kOneHot) s.group = random.below(groups);
  return s;
}

Activation draw_activation(Random& random) {
  const double u = random.uniform();
  if (u < 0.5) return Activation::swiglu();
  if (u < 0.7) return Activation::geglu_tanh();
  return u < 0.85 ? Activation::clamped_swiglu() : Activation::clamped_swiglu(1.5F, 1.0F, 0.0F);
}

GluLayout draw_layout(Random& random, int64_t ffn) {
  const int32_t order = random.chance(0.25) ? MOIRE_UP_FIRST : MOIRE_GATE_FIRST;
  int64_t block = 0;
  if (random.chance(0.5)) {
    const int64_t blocks[] = {1, 2, 8, 32, ffn};
    block = pick(random, blocks);
  }
  return GluLayout::interleaved(ffn % std::max<int64_t>(block, 1) == 0 ? block : 1, order);
}

// Wider rows than a block of a GPU takes at once (512 to 4096 columns), and more choices; few and
// thin enough for the reference.
void draw_wide_sizes(Random& random, Problem& p) {
  constexpr int64_t kParts[] = {512, 2048, 4096};
  const bool chooses = random.chance(0.5);
  p.groups = chooses ? 12 + random.below(4) : 1 + random.below(3);
  p.hidden = p.ffn = 1 + random.below(chooses ? 3 : 8);
  int64_t& wide = random.chance(0.6) ? p.hidden : p.ffn;
  wide = pick(random, kParts) + 1 + random.below(900);
  if (random.chance(0.7)) wide = (wide + 7) / 8 * 8;  // so that elements may lie in vectors
  p.rows = 1 + random.below(24);
  p.topk = 1 + random.below(std::min<int64_t>(p.groups, 12));
  p.dropped = (p.topk - p.rows % p.topk) % p.topk + p.topk * random.below(2);
}

void draw_sizes(Random& random, Problem& p) {
  if (random.chance(1.0 / 16)) return draw_wide_sizes(random, p);
  p.groups = random.chance(0.05) ? 100 + random.below(413) : 1 + random.below(9);
  p.hidden = draw_size(random, 700);
  p.ffn = draw_size(random, 400);
  // The reference computes in scalars: keep one case within milliseconds.
  if (p.hidden * p.ffn * p.groups > 200000) p.hidden = p.ffn = 1 + random.below(24);
  p.rows = random.chance(0.05) ? 0 : draw_size(random, 600);
  if (p.rows * p.hidden * p.ffn > 4000000) p.rows = 1 + random.below(40);
  if (random.chance(0.02)) p.groups = p.rows = 0;
  p.topk = random.chance(0.5) ? 1 : 1 + random.below(4);
  p.topk = std::min(p.topk, std::max<int64_t>(p.groups, 1));
  p.dropped = (p.topk - p.rows % p.topk) % p.topk;
}

Format draw_format(Random& random) {
  const Format all[] = {{DType::kFP32},
                        {DType::kFP16},
                        {DType::kBF16},
                        {DType::kBF16, Quantization::kMxfp8},
                        {DType::kBF16, Quantization::kFp8Block}};
  return pick(random, all);
}

// Of one product, or of a layer and what its forward keeps.
void draw_operands(Random& random, Problem& p) {
  const bool is_product = p.op->multiplies() && !p.op->is_layer();
  if (is_product && random.chance(0.5)) p.b = draw_format(random);
  if (p.quantization == Quantization::kNone) return;
  const bool sums_fast = p.fast || p.quantization == Quantization::kFp8Block;
  p.emulated = sums_fast && p.b_format().quantization != Quantization::kNone && random.chance(0.2);
  if (random.chance(0.3)) p.element = DType::kE5M2;
  p.fractional = p.quantization == Quantization::kFp8Block && random.chance(0.4);
  if (p.op->is_layer() && random.chance(0.4))
    p.x = random.chance(0.5) ? DType::kFP32 : DType::kFP16;
  p.x_columnwise = random.chance(0.3);
  p.act_columnwise = random.chance(0.3);
}

// What check_fp8() of problem.cpp accepts.
void draw_fp8(Random& random, Problem& p) {
  const bool reads = p.is("dequantize") || p.is("requantize");
  const bool takes_tiles = p.is("quantize_weight") || p.is("dequantize");
  const bool converts = p.is("convert_scales");
  if (!p.is("quantize") && !converts && !takes_tiles && !reads) return;
  if (!converts) {
    p.scaling = 1 + static_cast<int32_t>(random.below(takes_tiles ? 3 : 2));
  }
  p.element = random.chance(0.7) ? DType::kE4M3 : DType::kE5M2;
  const bool makes = !reads && !converts;
  p.directions = static_cast<Directions>(random.below(makes ? 3 : 2));
  p.fractional = p.scaling != MOIRE_SCALING_MXFP8 && random.chance(0.4);
  p.scale_layout = static_cast<int32_t>(random.below(4));
}

}  // namespace

Problem random_problem(uint64_t seed, int64_t i, const std::vector<const Op*>& ops,
                       const std::vector<Problem>& dtypes) {
  Random random(seed * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(i));
  Problem p;
  p.op = ops.empty() ? &pick(random, all_ops()) : pick(random, ops);
  draw_sizes(random, p);
  const DType all[] = {DType::kFP32, DType::kBF16, DType::kFP16};
  p.dtype = pick(random, all);
  if (!dtypes.empty()) {
    const Problem& drawn = pick(random, dtypes);
    p.dtype = drawn.dtype;
    p.quantization = drawn.quantization;
    p.fast = drawn.fast;
  } else if (random.chance(0.4)) {
    p.dtype = DType::kBF16;
    p.quantization = random.chance(0.6) ? Quantization::kMxfp8 : Quantization::kFp8Block;
    p.fast = p.quantization == Quantization::kMxfp8 && random.chance(0.3);
  }
  if (!p.op->multiplies()) {
    p.quantization = Quantization::kNone;
    p.fast = false;
  }
  draw_operands(random, p);
  if (random.chance(0.3)) p.out = pick(random, all);
  if (p.groups > 0) p.splits = draw_splits(random, p.groups);
  p.activation = draw_activation(random);
  p.layout = draw_layout(random, p.ffn);
  p.bias = random.chance(0.4);
  p.probs = random.chance(0.7);
  p.gather = random.chance(0.4);
  p.in_out = random.chance(0.3);
  p.listed = random.chance(0.25);
  p.sigmoid = random.chance(0.4);
  p.normalize = random.chance(0.7);
  p.save_act = random.chance(0.3);
  p.tail = random.chance(0.5) ? 0 : 1 + random.below(20);
  p.keep_tail = random.chance(0.3);
  p.beta = static_cast<int>(random.below(3));
  p.seed = random.bits() % 1000000;
  draw_fp8(random, p);
  // unpermute stores the dtype of its rows, or FP32.
  if (p.is("unpermute") && p.out != DType::kNone) p.out = DType::kFP32;
  // A router cannot choose among no experts.
  const bool routes = p.is("router") || p.is("router_backward");
  if (routes && p.groups == 0) p.groups = 1;
  return p;
}

}  // namespace moire::tool
