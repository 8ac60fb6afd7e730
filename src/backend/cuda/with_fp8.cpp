#include "backend/cuda/with_fp8.h"

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

// What the first does not take, the second may. The first refuses exact sums, which most calls
// want: it is asked about the others alone, for each call is planned several times.
template <class A, const Implementation<A>& kFast, const Implementation<A>& kExact>
class FirstOf : public Chosen<A> {
 public:
  FirstOf(const DeviceState& state, const A& args, const Workspace&)
      : FirstOf(is_fast(args) ? kFast.supports(state, args) : Reason(), state, args) {}

  Reason supports() const {
    if (&this->chosen_ == &kFast) return {};
    const Reason second = Chosen<A>::supports();
    // Whose refusal is the one to mend: of a call that asks for exact sums, the second's.
    return second && refusal_ ? refusal_ : second;
  }
  std::string policy() const {
    const std::string policy = Chosen<A>::policy();
    return refusal_ ? concat(policy, "; no FP8 tensor cores: ", *refusal_) : policy;
  }

 private:
  static bool is_fast(const A& args) { return args.accumulation == MOIRE_ACCUMULATE_FAST; }
  FirstOf(Reason refusal, const DeviceState& state, const A& args)
      : Chosen<A>{state, args, is_fast(args) && !refusal ? kFast : kExact},
        refusal_(std::move(refusal)) {}

  Reason refusal_;  // by the first, of a call that asks for fast sums
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

const moire_tensor& weight_scales(const GroupedGemmArgs& args) { return args.b_scales; }
const moire_tensor& weight_scales(const GroupedGemmGluArgs& args) { return args.b_scales; }
const moire_tensor& weight_scales(const GroupedGemmGluBackwardArgs& args) { return args.w2_scales; }

// Quantised weights are decoded inside the kernel that does, where it takes the call; else before
// the product.
template <class A, const Implementation<A>& kInside, const Implementation<A>& kBefore>
class ByWeight : public Chosen<A> {
 public:
  ByWeight(const DeviceState& state, const A& args, const Workspace&)
      : ByWeight(is_quantised(args) ? kInside.supports(state, args) : Reason(), state, args) {}

  Reason supports() const { return &this->chosen_ == &kInside ? Reason() : Chosen<A>::supports(); }
  std::string policy() const {
    const std::string policy = Chosen<A>::policy();
    return refusal_ ? concat(policy, "; weight not decoded in registers: ", *refusal_) : policy;
  }

 private:
  static bool is_quantised(const A& args) { return is_present(weight_scales(args)); }
  ByWeight(Reason refusal, const DeviceState& state, const A& args)
      : Chosen<A>{state, args, is_quantised(args) && !refusal ? kInside : kBefore},
        refusal_(std::move(refusal)) {}

  Reason refusal_;  // of a quantised weight's product
};

// On Hopper: the FP8 tensor cores where their sums may be used; else decoded operands, MXFP8's.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kProduct>
struct OnHopper {
  static constexpr Implementation<A> kFast =
      quantized_product<A, kScaled, Decoding::kBesideBf16, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kExact =
      quantized_product<A, kProduct, Decoding::kMxfp8, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kBoth =
      implementation_of<A, FirstOf<A, kFast, kExact>>("sm90");
};

// The same, and kernels that decode weights themselves.
template <class A, const Implementation<A>& kScaled, const Implementation<A>& kDecoding,
          const Implementation<A>& kProduct>
struct OfWeights : OnHopper<A, kScaled, kProduct> {
  using Base = OnHopper<A, kScaled, kProduct>;
  static constexpr Implementation<A> kInside =
      quantized_product<A, kDecoding, Decoding::kMxfp8Rows, Copies::kByActivation>("sm90");
  static constexpr Implementation<A> kExact =
      implementation_of<A, ByWeight<A, kInside, Base::kExact>>("sm90");
  static constexpr Implementation<A> kAll =
      implementation_of<A, FirstOf<A, Base::kFast, kExact>>("sm90");
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
