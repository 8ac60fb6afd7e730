// The grouped GEMMs with the FP8 operands and outputs that their kernels leave to others
// (ops/quantized_product.h): those of sm90 multiply and store BF16, those of portable multiply
// operands of one kind and store floats.
#include "backend/cuda/implementation_of.h"
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/glu_apart.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"

namespace moire::cuda {

using ops::Copies;
using ops::Decoding;
using ops::quantized_product;

namespace {

// A call that one of two implementations under one name takes.
template <class A>
struct Chosen {
  Reason supports() const { return chosen_.supports(state_, args_); }
  size_t workspace() const { return chosen_.workspace(state_, args_); }
  std::string policy() const { return chosen_.policy(state_, args_); }
  int64_t launches() const { return launches_of(chosen_, state_, args_); }
  Status run(const Context& context) const { return chosen_.run(context, args_); }

  const DeviceState& state_;
  const A& args_;
  const Implementation<A>& chosen_;
};

// The first implementation where a call wishes for what it alone does and it takes the call; else
// the second, whose policy says why. Other calls are not put to the first, for each is planned
// several times. A Wish knows its calls, how a policy says that it is not met, and whether, where
// neither takes the call, the first's refusal is the one to mend.
template <class A, class Wish, const Implementation<A>& kFirst, const Implementation<A>& kSecond>
class FirstOf : public Chosen<A> {
 public:
  FirstOf(const DeviceState& state, const A& args, const Workspace&)
      : FirstOf(Wish::is_of(args) ? kFirst.supports(state, args) : Reason(), state, args) {}

  Reason supports() const {
    if (&this->chosen_ == &kFirst) return {};
    const Reason second = Chosen<A>::supports();
    return second && refusal_ && Wish::kIsMended ? refusal_ : second;
  }
  std::string policy() const {
    const std::string policy = Chosen<A>::policy();
    return refusal_ ? concat(policy, Wish::kNotMet, *refusal_) : policy;
  }

 private:
  FirstOf(Reason refusal, const DeviceState& state, const A& args)
      : Chosen<A>{state, args, Wish::is_of(args) && !refusal ? kFirst : kSecond},
        refusal_(std::move(refusal)) {}

  Reason refusal_;  // by the first
};

// The FP8 tensor cores' sums: a call that asks for exact ones does not want that refusal mended.
struct FastSums {
  static constexpr std::string_view kNotMet = "; no FP8 tensor cores: ";
  static constexpr bool kIsMended = true;
  static bool is_of(const auto& args) { return args.accumulation == MOIRE_ACCUMULATE_FAST; }
};

// Quantised weights are decoded inside the kernel that does, where it takes the call; else before
// the product.
struct DecodedInside {
  static constexpr std::string_view kNotMet = "; weight not decoded in registers: ";
  static constexpr bool kIsMended = false;
  static bool is_of(const GroupedGemmGluBackwardArgs& args) { return is_present(args.w2_scales); }
  static bool is_of(const auto& args) { return is_present(args.b_scales); }
};

// The activation in the product's epilogue, where its kernels have that and nobody leaves it copies
// to make; else apart.
template <class A, const Implementation<A>& kFused, const Implementation<A>& kApart>
struct ByActivation : Chosen<A> {
  ByActivation(const DeviceState& state, const A& args, const Workspace&)
      : Chosen<A>{state, args, is_fused(args) ? kFused : kApart} {}

 private:
  static bool is_fused(const A& args) {
    return ops::has_epilogue(args.activation, args.layout) && !ops::leaves_copies(args);
  }
};

// On Hopper: the FP8 tensor cores where their sums may be used; else decoded operands, MXFP8's.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kProduct>
struct OnHopper {
  static constexpr Implementation<A> kFast =
      quantized_product<A, kScaled, Decoding::kBesideBf16, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kExact =
      quantized_product<A, kProduct, Decoding::kMxfp8, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kBoth =
      implementation_of<A, FirstOf<A, FastSums, kFast, kExact>>("sm90");
};

// The same, and kernels that decode weights themselves.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kDecoding,
          const Implementation<A>& kProduct>
struct OfWeights : OnHopper<A, kScaled, kProduct> {
  using Base = OnHopper<A, kScaled, kProduct>;
  static constexpr Implementation<A> kInside =
      quantized_product<A, kDecoding, Decoding::kMxfp8Rows, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kExact =
      implementation_of<A, FirstOf<A, DecodedInside, kInside, Base::kExact>>("sm90");
  static constexpr Implementation<A> kAll =
      implementation_of<A, FirstOf<A, FastSums, Base::kFast, kExact>>("sm90");
};

// FC1 and FC2's dgrad, of a product and of what has the activation in its epilogue.
template <const Implementation<GroupedGemmArgs>& kProduct, Multiply& kMultiply,
          const Implementation<GroupedGemmGluArgs>& kFused,
          const Implementation<GroupedGemmGluBackwardArgs>& kFusedBackward>
struct Glu {
  using Forward = ByActivation<GroupedGemmGluArgs, kFused, ops::kGluApart<kProduct, kMultiply>>;
  using Backward = ByActivation<GroupedGemmGluBackwardArgs, kFusedBackward,
                                ops::kGluBackwardApart<kProduct, kMultiply>>;
  static constexpr auto kForward = implementation_of<GroupedGemmGluArgs, Forward>("glu");
  static constexpr auto kBackward = implementation_of<GroupedGemmGluBackwardArgs, Backward>("glu");
};

}  // namespace

namespace sm90::with_fp8 {

using HopperGlu =
    Glu<sm90::kGroupedGemm, sm90::multiply, sm90::kGroupedGemmGlu, sm90::kGroupedGemmGluBackward>;

const Implementation<GroupedGemmArgs> kGroupedGemm =
    OfWeights<GroupedGemmArgs, scaled::kGroupedGemm, decoding::kGroupedGemm,
              sm90::kGroupedGemm>::kAll;
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu =
    OfWeights<GroupedGemmGluArgs, ops::kGluApart<scaled::kGroupedGemm, scaled::multiply>,
              ops::kGluApart<decoding::kGroupedGemm, decoding::multiply>,
              HopperGlu::kForward>::kAll;
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward = OfWeights<
    GroupedGemmGluBackwardArgs, ops::kGluBackwardApart<scaled::kGroupedGemm, scaled::multiply>,
    ops::kGluBackwardApart<decoding::kGroupedGemm, decoding::multiply>, HopperGlu::kBackward>::kAll;
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
