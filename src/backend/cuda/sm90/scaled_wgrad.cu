// grouped_gemm_wgrad on SM90's FP8 tensor cores: both operands in blocks of 128 rows of a column.
// The tensor cores read along the rows that are contracted, so what does not lie transposed already
// is transposed first.
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/scaled_operands.cuh"
#include "backend/cuda/sm90/wgrad_epilogue.cuh"

namespace moire::cuda::sm90::scaled {
namespace {

bool is_e5m2(const TensorView& t) { return t.type() == DType::kE5M2; }

std::string why_not_padding(const Groups& groups) {
  if (groups.capacity >= 128 * groups.num_groups) return {};
  return concat(groups.capacity, " rows in ", groups.num_groups,
                " groups, transposed, would be padded by up to ", 128 * groups.num_groups, " more");
}

struct Call : PlannedCall<GroupedGemmWgradArgs> {
  Call(const DeviceState& device, const GroupedGemmWgradArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace),
        a_(args.a, args.a_scales, args.groups, true, arena),
        b_(args.b, args.b_scales, args.groups, true, arena),
        listed_(args.d, arena) {}

  // What lies transposed is asked the same as the rows that it was: then a layer, which has its
  // operands transposed, is its ops on the same kernels.
  Reason supports() const {
    const TensorView d(args.d.tensor), a = as_rows(args.a, args.a_scales, args.groups),
                                       b = as_rows(args.b, args.b_scales, args.groups);
    return first_of(
        {why_not_device(state), why_not_fast(args.accumulation),
         why_not_fp8({{"a", args.a}, {"b", args.b}}),
         is_e5m2(args.a) && is_e5m2(args.b) ? "a and b are e5m2, the kernel takes one so" : "",
         why_not_gradient(d), why_not_listed("d", Weight(args.d)), why_not_sizes(args.groups, d),
         why_not_padding(args.groups), why_not_words({{"a", a}, {"b", b}}),
         why_not_tma({{"a", a},
                      {"b", b},
                      {"a_scales", args.a_scales},
                      {"b_scales", args.b_scales},
                      {"d", d}})});
  }
  std::string policy() const {
    return concat("FP8 tensor cores, ",
                  stores_fp32(args) ? policy_text<ScaledFp32WgradTiles>(state, sizes(args))
                                    : policy_text<ScaledBf16WgradTiles>(state, sizes(args)),
                  a_.policy("a"), b_.policy("b"), listed_.policy());
  }
  int64_t launches() const { return 1 + a_.launches() + b_.launches() + listed_.launches(); }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_wgrad");
    a_.make(launcher);
    b_.make(launcher);
    listed_.write(launcher);
    stores_fp32(args) ? launch_tiles<float>(launcher, ScaledFp32WgradTiles())
                      : launch_tiles<__nv_bfloat16>(launcher, ScaledBf16WgradTiles());
    return launcher.status();
  }

 private:
  template <class T, class Tiles>
  void launch_tiles(Launcher& launcher, Tiles tiles) const {
    if (is_e5m2(args.a)) return launch_types<T, true, false>(launcher, tiles);
    if (is_e5m2(args.b)) return launch_types<T, false, true>(launcher, tiles);
    launch_types<T, false, false>(launcher, tiles);
  }

  template <class T, bool kA5, bool kB5, class Tiles>
  void launch_types(Launcher& launcher, Tiles tiles) const {
    const ProductSizes of = sizes(args);
    with_cheapest(tiles, of, state.num_multiprocessors, [&]<class P>(const Cost&) {
      TensorMaps maps(launcher);
      const Matrices d{Weight(args.d)};
      const ScaledRaggedK<kA5, kB5> operands{maps.matrix("a", a_.codes(), P::kTileM),
                                             maps.matrix("b", b_.codes(), P::kTileN),
                                             maps.matrix("a_scales", a_.scales(), 1, P::kTileM),
                                             maps.matrix("b_scales", b_.scales(), 1, P::kTileN),
                                             static_cast<int32_t>(of.m),
                                             static_cast<int32_t>(of.n)};
      const Accumulate<T> epilogue{maps.matrices("d", d, P::kBoxRows), operands.n, args.beta,
                                   args.beta_per_group};
      launch<P>(launcher, of, args.groups, operands, epilogue, numbers(d, listed_));
    });
  }

  ops::CoreCodes a_, b_;
  ops::ListedMatrices listed_;
};

}  // namespace

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    implementation_of<GroupedGemmWgradArgs, Call>("sm90");

}  // namespace moire::cuda::sm90::scaled
