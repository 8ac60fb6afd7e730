#include "backend/cuda/with_fp8.h"

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/glu_apart.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"

namespace moire::cuda {

using ops::Decoding;
using ops::quantized_product;

namespace {

// One of two implementations under one name: Choice::choice() says which takes a call.
template <class A, class Choice>
struct Chosen {
  static Reason supports(const DeviceState& state, const A& args) {
    return Choice::choice(state, args).supports(state, args);
  }
  static size_t workspace(const DeviceState& state, const A& args) {
    return Choice::choice(state, args).workspace(state, args);
  }
  static std::string policy(const DeviceState& state, const A& args) {
    return Choice::choice(state, args).policy(state, args);
  }
  static Status run(const Context& context, const A& args) {
    return Choice::choice(context.state(), args).run(context, args);
  }
  static int64_t launches(const DeviceState& state, const A& args) {
    return launches_of(Choice::choice(state, args), state, args);
  }
};

// What the first does not take, the second may.
template <class A, const Implementation<A>& kFirst, const Implementation<A>& kSecond>
struct FirstOf : Chosen<A, FirstOf<A, kFirst, kSecond>> {
  static const Implementation<A>& choice(const DeviceState& state, const A& args) {
    return kFirst.supports(state, args) ? kSecond : kFirst;
  }
  static Reason supports(const DeviceState& state, const A& args) {
    const Reason first = kFirst.supports(state, args);
    if (!first) return {};
    const Reason second = kSecond.supports(state, args);
    // Whose refusal is the one to mend: of a call that asks for exact sums, the second's.
    return second && args.accumulation == MOIRE_ACCUMULATE_FAST ? first : second;
  }
  static std::string policy(const DeviceState& state, const A& args) {
    const Reason first = kFirst.supports(state, args);
    if (!first) return kFirst.policy(state, args);
    const std::string policy = kSecond.policy(state, args);
    if (args.accumulation != MOIRE_ACCUMULATE_FAST) return policy;
    return concat(policy, "; no FP8 tensor cores: ", *first);
  }
};

// The activation in the product's epilogue, where its kernels have that, else apart.
template <class A, const Implementation<A>& kFused, const Implementation<A>& kApart>
struct ByActivation : Chosen<A, ByActivation<A, kFused, kApart>> {
  static const Implementation<A>& choice(const DeviceState&, const A& args) {
    return ops::has_epilogue(args.activation, args.layout) ? kFused : kApart;
  }
};

template <class A, class Choice>
constexpr Implementation<A> implementation(std::string_view name) {
  return {name,           Device::kCuda, Choice::supports, Choice::workspace,
          Choice::policy, Choice::run,   Choice::launches};
}

// On Hopper: the FP8 tensor cores where their sums may be used; else decoded operands, MXFP8's.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kProduct>
struct OnHopper {
  static constexpr Implementation<A> kFast =
      quantized_product<A, kScaled, Decoding::kBesideBf16>("sm90");
  static constexpr Implementation<A> kExact =
      quantized_product<A, kProduct, Decoding::kMxfp8>("sm90");
  static constexpr Implementation<A> kBoth = implementation<A, FirstOf<A, kFast, kExact>>("sm90");
};

// FC1 and FC2's dgrad, of a product and of what has the activation in its epilogue.
template <const Implementation<GroupedGemmArgs>& kProduct, Multiply& kMultiply,
          const Implementation<GroupedGemmGluArgs>& kFused,
          const Implementation<GroupedGemmGluBackwardArgs>& kFusedBackward>
struct Glu {
  using Forward = ByActivation<GroupedGemmGluArgs, kFused, ops::GluApart<kProduct, kMultiply>::kOp>;
  using Backward = ByActivation<GroupedGemmGluBackwardArgs, kFusedBackward,
                                ops::GluBackwardApart<kProduct, kMultiply>::kOp>;
  static constexpr auto kForward = implementation<GroupedGemmGluArgs, Forward>("glu");
  static constexpr auto kBackward = implementation<GroupedGemmGluBackwardArgs, Backward>("glu");
};

}  // namespace

namespace sm90::with_fp8 {

using HopperGlu =
    Glu<sm90::kGroupedGemm, sm90::multiply, sm90::kGroupedGemmGlu, sm90::kGroupedGemmGluBackward>;
using ScaledGlu = ops::GluApart<scaled::kGroupedGemm, scaled::multiply>;
using ScaledGluBackward = ops::GluBackwardApart<scaled::kGroupedGemm, scaled::multiply>;

const Implementation<GroupedGemmArgs> kGroupedGemm =
    OnHopper<GroupedGemmArgs, scaled::kGroupedGemm, sm90::kGroupedGemm>::kBoth;
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    OnHopper<GroupedGemmGluArgs, ScaledGlu::kOp, HopperGlu::kForward>::kBoth;
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    OnHopper<GroupedGemmGluBackwardArgs, ScaledGluBackward::kOp, HopperGlu::kBackward>::kBoth;
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    OnHopper<GroupedGemmWgradArgs, scaled::kGroupedGemmWgrad, sm90::kGroupedGemmWgrad>::kBoth;

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

using PlainGlu = Glu<portable::kGroupedGemm, portable::multiply, portable::kGroupedGemmGlu,
                     portable::kGroupedGemmGluBackward>;

const Implementation<GroupedGemmArgs> kGroupedGemm =
    quantized_product<GroupedGemmArgs, portable::kGroupedGemm, Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    quantized_product<GroupedGemmGluArgs, PlainGlu::kForward, Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    quantized_product<GroupedGemmGluBackwardArgs, PlainGlu::kBackward, Decoding::kBesideBf16>(
        "portable");
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    quantized_product<GroupedGemmWgradArgs, portable::kGroupedGemmWgrad, Decoding::kBesideBf16>(
        "portable");

}  // namespace portable::with_fp8

}  // namespace moire::cuda
