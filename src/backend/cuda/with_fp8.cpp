// The grouped GEMMs with the FP8 operands and outputs that their kernels leave to others
// (ops/quantized_product.h): those of sm90 multiply and store BF16, those of portable multiply
// operands of one kind and store floats.
#include "backend/cuda/implementations.h"
#include "backend/cuda/ops/glu_apart.h"
#include "backend/cuda/ops/quantized_product.h"
#include "core/format.h"

namespace moire::cuda {

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
template <class Wish, const auto& kFirst, const auto& kSecond, class A = ops::ArgsOf<kFirst>>
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
template <const auto& kFused, const auto& kApart, class A = ops::ArgsOf<kFused>>
struct ByActivation : Chosen<A> {
  ByActivation(const DeviceState& state, const A& args, const Workspace&)
      : Chosen<A>{state, args, is_fused(args) ? kFused : kApart} {}

 private:
  static bool is_fused(const A& args) {
    return ops::has_epilogue(args.activation, args.layout) && !ops::leaves_copies(args);
  }
};

template <const auto& kFused, const auto& kApart>
constexpr auto kByActivation =
    implementation_of<ops::ArgsOf<kFused>, ByActivation<kFused, kApart>>("glu");
template <class Wish, const auto& kFirst, const auto& kSecond>
constexpr auto kFirstOf =
    implementation_of<ops::ArgsOf<kFirst>, FirstOf<Wish, kFirst, kSecond>>("sm90");

// A product of Hopper's kernels and what is around it.
template <const auto& kProduct, Decoding kDecoding>
constexpr auto kAround = quantized_product<kProduct, kDecoding, ops::Copies::kByActivation>("sm90");

// The FP8 tensor cores where their sums may be used; else exact ones.
template <const auto& kScaled, const auto& kExact>
constexpr auto kOnHopper = kFirstOf<FastSums, kAround<kScaled, Decoding::kBesideBf16>, kExact>;

// Exact sums of weights: kernels that decode them, or decoded operands, MXFP8's.
template <const auto& kDecoding, const auto& kProduct>
constexpr auto kExactOfWeights = kFirstOf<DecodedInside, kAround<kDecoding, Decoding::kMxfp8Rows>,
                                          kAround<kProduct, Decoding::kMxfp8>>;

}  // namespace

namespace sm90::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    kOnHopper<scaled::kGroupedGemm, kExactOfWeights<decoding::kGroupedGemm, sm90::kGroupedGemm>>;
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = kOnHopper<
    ops::kGluApart<scaled::kGroupedGemm>,
    kExactOfWeights<ops::kGluApart<decoding::kGroupedGemm>,
                    kByActivation<sm90::kGroupedGemmGlu, ops::kGluApart<sm90::kGroupedGemm>>>>;
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    kOnHopper<ops::kGluBackwardApart<scaled::kGroupedGemm>,
              kExactOfWeights<ops::kGluBackwardApart<decoding::kGroupedGemm>,
                              kByActivation<sm90::kGroupedGemmGluBackward,
                                            ops::kGluBackwardApart<sm90::kGroupedGemm>>>>;
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    kOnHopper<scaled::kGroupedGemmWgrad, kAround<sm90::kGroupedGemmWgrad, Decoding::kMxfp8>>;

}  // namespace sm90::with_fp8

namespace portable::with_fp8 {

const Implementation<GroupedGemmArgs> kGroupedGemm =
    quantized_product<portable::kGroupedGemm, Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluArgs> kGroupedGemmGlu = quantized_product<
    kByActivation<portable::kGroupedGemmGlu, ops::kGluApart<portable::kGroupedGemm>>,
    Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmGluBackwardArgs> kGroupedGemmGluBackward =
    quantized_product<kByActivation<portable::kGroupedGemmGluBackward,
                                    ops::kGluBackwardApart<portable::kGroupedGemm>>,
                      Decoding::kBesideBf16>("portable");
const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    quantized_product<portable::kGroupedGemmWgrad, Decoding::kBesideBf16>("portable");

}  // namespace portable::with_fp8

}  // namespace moire::cuda
