#include "backend/cuda/with_fp8.h"

#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"

namespace moire::cuda {

using ops::Decoding;
using ops::quantized_product;

namespace {

// Two implementations under one name: what the first does not take, the second may.
template <class A, const Implementation<A>& kFirst, const Implementation<A>& kSecond>
struct FirstOf {
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
  static size_t workspace(const DeviceState& state, const A& args) {
    return choice(state, args).workspace(state, args);
  }
  static std::string policy(const DeviceState& state, const A& args) {
    const Reason first = kFirst.supports(state, args);
    if (!first) return kFirst.policy(state, args);
    const std::string policy = kSecond.policy(state, args);
    if (args.accumulation != MOIRE_ACCUMULATE_FAST) return policy;
    return concat(policy, "; no FP8 tensor cores: ", *first);
  }
  static Status run(const Context& context, const A& args) {
    return choice(context.state(), args).run(context, args);
  }
  static int64_t launches(const DeviceState& state, const A& args) {
    return choice(state, args).launches(state, args);
  }
};

// On Hopper: the FP8 tensor cores where their sums may be used; else decoded operands, MXFP8's.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kProduct>
struct OnHopper {
  static constexpr Implementation<A> kFast =
      quantized_product<A, kScaled, Decoding::kBesideBf16>("sm90");
  static constexpr Implementation<A> kExact =
      quantized_product<A, kProduct, Decoding::kMxfp8>("sm90");
  using Both = FirstOf<A, kFast, kExact>;
  static constexpr Implementation<A> kBoth = {"sm90",          Device::kCuda, Both::supports,
                                              Both::workspace, Both::policy,  Both::run,
                                              Both::launches};
};

}  // namespace

namespace sm90::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    OnHopper<GroupedGemmArgs, scaled::kGroupedGemm, sm90::kGroupedGemm>::kBoth;
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    OnHopper<GroupedGemmGluArgs, scaled::kGroupedGemmGlu, sm90::kGroupedGemmGlu>::kBoth;
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    OnHopper<GroupedGemmGluBackwardArgs, scaled::kGroupedGemmGluBackward,
             sm90::kGroupedGemmGluBackward>::kBoth;
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    OnHopper<GroupedGemmWgradArgs, scaled::kGroupedGemmWgrad, sm90::kGroupedGemmWgrad>::kBoth;

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    quantized_product<GroupedGemmArgs, portable::kGroupedGemm, Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    quantized_product<GroupedGemmGluArgs, portable::kGroupedGemmGlu, Decoding::kBesideBf16>(
        "portable");
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    quantized_product<GroupedGemmGluBackwardArgs, portable::kGroupedGemmGluBackward,
                      Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    quantized_product<GroupedGemmWgradArgs, portable::kGroupedGemmWgrad, Decoding::kBesideBf16>(
        "portable");

}  // namespace portable::with_fp8

}  // namespace moire::cuda
