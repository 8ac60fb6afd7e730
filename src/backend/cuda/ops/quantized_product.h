// FP8 around a product whose kernels know none: operands are decoded into BF16 before it, and what
// it stores is quantised after it. What the caller has no use for is stored in the workspace, or,
// where one copy is asked for and that as values, in the copy, which is then rounded in place.
// Quantising what was stored is what the contract says of quantised outputs.
//
// `around` says of each op which fields these are; quantized_product() makes an implementation that
// takes them of one that does not.
#pragma once

#include "backend/cuda/implementations.h"
#include "core/format.h"
#include "core/status_macros.h"

namespace moire::cuda::ops {

// Which operands come decoded: MXFP8 ones, of which a decoded element is a BF16 number
// (docs/numerics.md), or, where the product's kernels decode, those alone that stand beside a BF16
// one, which tensor cores multiply by no other type; or MXFP8 rows alone, where they decode
// weights.
enum class Decoding { kMxfp8, kMxfp8Rows, kBesideBf16 };

// Whether an activation's kernel makes copies itself, those that leaves_copies() says it can
// (glu_copies.h), or all are made behind it.
enum class Copies { kByActivation, kBehindIt };

// An operand of a product: rows, or weights, with FP8 blocks along `direction`.
struct Operand {
  const char* name;  // a literal
  moire_tensor &data, &scales;
  int32_t direction;
  moire_groups groups;  // absent: of all rows
};

// Calls of one op, for an operand or an output each.
template <class A, const Implementation<A>& kOp>
class Calls {
 public:
  // `name` is a literal.
  void add(const char* name, const A& args) { steps_[size_++] = {name, args}; }
  Reason supports(const DeviceState& state) const {
    Reason reason;
    for (int i = 0; i < size_ && !reason; ++i) reason = kOp.supports(state, steps_[i].args);
    return reason;
  }
  Status run(const Context& context, std::string_view op) const {
    for (int i = 0; i < size_; ++i) {
      MOIRE_RETURN_IF_ERROR(kOp.run(context.within({op, steps_[i].name}), steps_[i].args));
    }
    return {};
  }
  // `before` NAME and NAME `behind`; nothing if there is no step.
  std::string policy(std::string_view before, std::string_view behind) const {
    std::string text;
    for (int i = 0; i < size_; ++i) text += concat(i == 0 ? before : " and ", steps_[i].name);
    return size_ == 0 ? text : concat(text, behind);
  }
  int64_t launches(const DeviceState& state) const {
    int64_t count = 0;
    for (int i = 0; i < size_; ++i) count += launches_of(kOp, state, steps_[i].args);
    return count;
  }

 private:
  struct {
    const char* name;
    A args;
  } steps_[2];
  int size_ = 0;
};

// The steps around a product, found while its arguments are rewritten.
class Around {
 public:
  Around(std::string_view op, const Workspace& workspace) : op_(op), arena_(workspace) {}

  // Replaces those that come decoded; the second is the weights, if there are some.
  void operands(Decoding decoding, const Operand& a, const Operand& b);
  // Takes these copies off the product of a call; `stored` is present then.
  void output(const char* name, const auto& call, moire_tensor& stored, DType storage,
              int64_t columns, moire_quantized& rowwise, moire_quantized& columnwise);
  // The same of copies that the activation makes: they stay with it, and the memory that making
  // them behind it would take is taken all the same, so that a call's workspace does not
  // depend on how the copies are aligned.
  void left_output(DType storage, int64_t columns, const moire_groups& groups) {
    arena_.take_aligned(storage, groups.capacity, columns);
  }
  // Why these steps cannot be made; nothing if they can.
  Reason refusal(const DeviceState& state) const {
    const Reason reason = reason_ ? reason_ : decoded_.supports(state);
    return reason ? reason : copied_.supports(state);
  }
  const Arena& arena() const { return arena_; }
  Status decode(const Context& context) const { return decoded_.run(context, op_); }
  Status quantize(const Context& context) const { return copied_.run(context, op_); }
  // What it adds to the product's.
  std::string policy() const {
    return decoded_.policy(", after decoding ", " into bf16") +
           copied_.policy(", then ", " quantised");
  }
  int64_t launches(const DeviceState& state) const {
    return decoded_.launches(state) + copied_.launches(state);
  }

 private:
  void decode(const Operand& operand);

  std::string_view op_;  // a literal
  Arena arena_;
  Calls<DequantizeArgs, kDequantize> decoded_;
  Calls<QuantizeArgs, kQuantize> copied_;
  Reason reason_;  // why an operand cannot be decoded
};

// Rewrites the arguments of a call, by steps whose scratch is `memory`.
Around around(GroupedGemmArgs& args, const Workspace& memory, Decoding decoding, Copies);
Around around(GroupedGemmGluArgs& args, const Workspace& memory, Decoding decoding, Copies copies);
Around around(GroupedGemmGluBackwardArgs& args, const Workspace& memory, Decoding decoding,
              Copies copies);
Around around(GroupedGemmWgradArgs& args, const Workspace& memory, Decoding decoding, Copies);

// The arguments of an implementation's op.
template <class A>
A args_of(const Implementation<A>&);
template <const auto& kOne>
using ArgsOf = decltype(args_of(kOne));

// kProduct, and what is around it.
template <const auto& kProduct, Decoding kDecoding, Copies kCopies, class A = ArgsOf<kProduct>>
struct WithQuantized {
  WithQuantized(const DeviceState& device, const A& call, const Workspace& memory)
      : state(device), args(call), steps(around(args, memory, kDecoding, kCopies)) {
    args.workspace = steps.arena().rest();
  }

  Reason supports() const {
    // The model of FP8 tensor cores is no device's but the CPU's.
    if (args.accumulation == MOIRE_ACCUMULATE_EMULATED) {
      return "the sums of FP8 tensor cores are asked for, which the CPU emulates";
    }
    if (Reason reason = steps.refusal(state)) return reason;
    return kProduct.supports(state, args);
  }
  size_t workspace() const {
    Arena arena = steps.arena();
    arena.take(static_cast<int64_t>(kProduct.workspace(state, args)));
    return arena.used();
  }
  std::string policy() const { return kProduct.policy(state, args) + steps.policy(); }
  int64_t launches() const { return launches_of(kProduct, state, args) + steps.launches(state); }
  Status run(const Context& context) const {
    MOIRE_RETURN_IF_ERROR(steps.decode(context));
    MOIRE_RETURN_IF_ERROR(kProduct.run(context, args));
    return steps.quantize(context);
  }

  const DeviceState& state;
  A args;  // the product's
  Around steps;
};

template <const auto& kProduct, Decoding kDecoding, Copies kCopies = Copies::kBehindIt>
constexpr auto quantized_product(std::string_view name) {
  return implementation_of<ArgsOf<kProduct>, WithQuantized<kProduct, kDecoding, kCopies>>(name);
}

}  // namespace moire::cuda::ops
