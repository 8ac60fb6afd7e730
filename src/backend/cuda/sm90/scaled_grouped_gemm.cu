// grouped_gemm on SM90's FP8 tensor cores: a in blocks of 1 x 128 along k, b in tiles of 128 x 128.
#include "backend/cuda/ops/core_codes.h"
#include "backend/cuda/ops/row_scales.h"
#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"
#include "backend/cuda/sm90/scaled_operands.cuh"

namespace moire::cuda::sm90::scaled {
namespace {

struct Call : PlannedCall<GroupedGemmArgs> {
  Call(const DeviceState& device, const GroupedGemmArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace),
        a_(args.a, args.a_scales, is_present(args.row_idx) ? moire_groups{} : args.groups, false,
           arena),
        rows_(a_.codes(), args.row_idx, args.groups, arena),
        has_turned_scales_(has_turned_scales(args.a, args.a_scales, args.groups)),
        row_scales_(a_.scales(), args.row_idx, args.groups, has_turned_scales_, arena),
        b_(args.b.tensor, args.b_scales, {}, !is_k_major(args), arena) {}

  Reason supports() const {
    const Weight b(args.b);
    const TensorView b_scales(args.b_scales);
    // Scales of columns of b are read four at a time.
    const bool reads_fours = b_scales.type() == DType::kE8M0 && !is_k_major(args);
    return first_of(
        {why_not_device(state), why_not_fast(args.accumulation),
         why_not_fp8({{"a", args.a}, {"b", b.tensor}}),
         why_not_type(DType::kE4M3, {{"b", b.tensor}}),
         why_not_words({{"a", args.a}, {"b", b.tensor}}),
         why_not_type(DType::kBF16, {{"d", args.d}}), why_not_sizes(args.groups, b.tensor),
         why_not_tma({{"a", args.a},
                      {"a_scales", has_turned_scales_ ? row_scales_.scales() : TensorView()},
                      {"b", b.tensor},
                      {"b_scales", reads_fours ? b_scales : TensorView()},
                      {"d", args.d}}),
         has_turned_scales_ && is_present(args.row_idx)
             ? "a_scales are turned over, the kernel takes no row_idx beside such"
             : ""});
  }
  std::string policy() const {
    return concat("FP8 tensor cores, ", policy_text<ScaledTiles>(state, sizes(args)),
                  a_.policy("a"), rows_.policy(), row_scales_.policy(), b_.policy("b"));
  }
  int64_t launches() const {
    return 1 + a_.launches() + rows_.launches() + row_scales_.launches() + b_.launches();
  }
  Status run(const Context& context, const char* op = "grouped_gemm") const {
    Launcher launcher(context, op);
    if (args.groups.capacity == 0) return launcher.status();
    a_.make(launcher);
    rows_.gather(launcher);
    row_scales_.make(launcher);
    b_.make(launcher);
    with_cheapest(ScaledTiles(), sizes(args), state.num_multiprocessors, [&]<class P>(const Cost&) {
      TensorView(args.a).type() == DType::kE5M2 ? launch_policy<P, true>(launcher)
                                                : launch_policy<P, false>(launcher);
    });
    return launcher.status();
  }

 private:
  template <class P, bool kIsE5M2>
  void launch_policy(Launcher& launcher) const {
    TensorMaps maps(launcher);
    const auto store = store_of<P, StoreStaged>(maps, args);
    const TensorView& b_scales = b_.scales();
    const auto stride = static_cast<int32_t>(b_scales.stride());
    const auto tiles = static_cast<int32_t>(b_scales.shape[1]);
    const ScaledRaggedM<kIsE5M2> operands{
        ragged_m<P, Major::kK>(maps, rows_.rows(), args.groups, b_.codes(), store.n, args.tail),
        maps.matrix("a_scales", row_scales_.scales(), 1, P::kRowScales),
        {static_cast<const float*>(b_scales.data), tiles * stride, stride, tiles - 1}};
    launch<P>(launcher, sizes(args), args.groups, operands, store);
  }

  ops::CoreCodes a_;
  ops::GatheredRows rows_;
  bool has_turned_scales_;
  ops::RowScales row_scales_;
  ops::CoreCodes b_;  // [G, n, k]
};

}  // namespace

const Product kGroupedGemm = product_of<Call>("sm90");

}  // namespace moire::cuda::sm90::scaled
