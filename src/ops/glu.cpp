// Gated activations and the layouts of their two halves: validation and dispatch.
#include <moire/glu.h>

#include <algorithm>

#include "core/resolved_groups.h"
#include "core/sizes.h"
#include "ops/dispatch.h"

namespace moire {
namespace {

// What both directions share: z [capacity, 2F], or [capacity, F] of an ungated layout, which gives
// the sizes, and `half`, [capacity, F].
NamedSize check_shared(ArgumentCheck& check, const auto& args, const NamedTensor& half) {
  const TensorView z(args.z);
  const NamedSize capacity{"capacity", z.num_rows()};
  const NamedSize f{"F", z.columns() / num_halves(args.layout)};
  if (!check.ranked("z", z, kFloatTypes, 2)) return f;
  check.require(z.columns() % num_halves(args.layout) == 0, "z is ", z,
                ", needs an even number of columns (gate and up)");
  check.gated(args.activation, args.layout, f.size);
  check.optional_tensor("probs", args.probs, kFP32Only, {capacity});
  if (!is_absent(args.groups)) {  // else every row is in use
    check.require(args.groups.capacity == capacity.size, "groups.capacity is ",
                  args.groups.capacity, " but z is ", z);
  }
  check.tensor(half.name, half.tensor, kFloatTypes, {capacity, f});
  check.same_dtype("z", z, half.name, half.tensor);
  return f;
}

void validate(ArgumentCheck& check, const GluArgs& args) {
  check_shared(check, args, {"act", args.act});
}

void validate(ArgumentCheck& check, const GluBackwardArgs& args) {
  const NamedSize f = check_shared(check, args, {"grad_act", args.grad_act});
  const TensorView z(args.z);
  const NamedSize capacity{"capacity", z.num_rows()};
  check.tensor("grad_z", args.grad_z, kFloatTypes, {capacity, z_columns(args.layout, f.size)});
  check.optional_tensor("act", args.act, kFloatTypes, {capacity, f});
  check.optional_tensor("grad_probs", args.grad_probs, kFP32Only, {capacity});
  check.same_dtype("z", z, "grad_z", args.grad_z);
  check.same_dtype("z", z, "act", args.act);
}

std::string layout_name(const moire_glu_layout& layout) {
  if (!is_gated(layout)) return "ungated";
  const std::string_view order = layout.order == MOIRE_GATE_FIRST ? "" : ", up first";
  return layout.block == 0 ? concat("halves", order) : concat("blocks of ", layout.block, order);
}

std::string problem_of(const auto& args) {
  constexpr std::string_view kNames[] = {"swiglu", "clamped swiglu", "geglu tanh", "reglu",
                                         "reglu2"};
  return concat(kNames[args.activation.kind], " of ", args.z, ", ", layout_name(args.layout));
}

constexpr DType kStorageTypes[] = {DType::kFP32,  DType::kBF16, DType::kFP16,  DType::kE4M3,
                                   DType::kE5M2,  DType::kE8M0, DType::kUint8, DType::kInt32,
                                   DType::kInt64, DType::kFP64};

// Rank, dtype, pointers, and that source and target are twins.
void check_tensors(ArgumentCheck& check, const TensorView& source, const TensorView& target) {
  check.require(source.rank >= 1 && source.rank <= 3, "source has rank ", source.rank,
                ", needs rank 1 to 3");
  if (!check.ok() || !check.ranked("source", source, kStorageTypes, source.rank)) return;
  if (!check.ranked("target", target, kStorageTypes, source.rank)) return;
  check.require(std::equal(source.shape, source.shape + source.rank, target.shape), "source is ",
                source, " but target is ", target, ": the shapes must be equal");
  check.same_dtype("source", source, "target", target);
}

// That the size along `dim` is a multiple of 2 * block. `block` 0 stands for halves.
void check_block(ArgumentCheck& check, const TensorView& source, int64_t dim, int64_t block) {
  if (!check.ok()) return;
  const int64_t size = source.shape[dim];
  const bool fits = block == 0 || (block <= kMostBytes && size / 2 % block == 0);
  check.require(size % 2 == 0 && fits, "source has ", size, " along dim ", dim,
                ", needs a multiple of 2 * block = ", product(2, std::max<int64_t>(block, 1)));
}

void check_layout(ArgumentCheck& check, std::string_view name, const moire_glu_layout& layout) {
  check.require(is_gated(layout), name, ".order is 2 (ungated), which has no halves to move");
  check.enumerator(concat(name, ".order"), layout.order, 2);
  check.require(layout.block >= 0, name, ".block is ", layout.block,
                ", must be a positive integer, or 0 (halves)");
}

std::string problem_of(const ConvertGluArgs& args) {
  return concat(TensorView(args.source), " along dim ", args.dim, ", ", layout_name(args.from),
                " to ", layout_name(args.to));
}

void validate(ArgumentCheck& check, const ConvertGluArgs& args) {
  check_tensors(check, args.source, args.target);
  check_layout(check, "from", args.from);
  check_layout(check, "to", args.to);
  check_block(check, args.source, args.dim, args.from.block);
  check_block(check, args.source, args.dim, args.to.block);
}

// From halves to blocks or back.
Status convert_halves(std::string_view name, const Context& context, const TensorView& source,
                      const TensorView& target, int dim, const GluLayout& from,
                      const GluLayout& to) {
  const int64_t block = from.block + to.block;
  if (block <= 0) return invalid(name, "block is ", block, ", must be a positive integer");
  ConvertGluArgs args;
  args.source = source;
  args.target = target;
  args.dim = dim;
  args.from = from;
  args.to = to;
  return Op<ConvertGluArgs>{name, validate, problem_of}.run(context, args);
}

}  // namespace

MOIRE_DEFINE_OP(glu)
MOIRE_DEFINE_OP(glu_backward)
MOIRE_DEFINE_OP(convert_glu)

Status interleave_glu(const Context& context, const TensorView& source, const TensorView& target,
                      int64_t block, int dim) {
  return convert_halves("interleave_glu", context, source, target, dim, GluLayout::halves(),
                        GluLayout::interleaved(block));
}

Status deinterleave_glu(const Context& context, const TensorView& source, const TensorView& target,
                        int64_t block, int dim) {
  return convert_halves("deinterleave_glu", context, source, target, dim,
                        GluLayout::interleaved(block), GluLayout::halves());
}

}  // namespace moire
