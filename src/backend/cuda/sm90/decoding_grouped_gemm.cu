// grouped_gemm on SM90 of BF16 rows and MXFP8 weights, which are decoded inside the kernel: d = a *
// op(b), with the bits of the product of decoded weights (grouped_gemm.cu).
#include "backend/cuda/sm90/decoding_epilogue.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90::decoding {
namespace {

std::string why_not_mxfp8(const TensorView& codes, const TensorView& scales) {
  if (codes.type() == DType::kE4M3 && scales.type() == DType::kE8M0) return {};
  return concat("b is ", dtype_name(codes.type()), ", the kernel decodes e4m3 with e8m0 scales");
}

// They are read in pairs, and those of a matrix counted in 31 bits.
std::string why_not_scales(const TensorView& scales, bool is_k_last) {
  if (!is_k_last && scales.columns() % 2 != 0) {
    return concat("b_scales have ", scales.columns(), " columns, the kernel reads them in pairs");
  }
  if (scales.stride() % 2 != 0 || reinterpret_cast<uintptr_t>(scales.data) % 2 != 0) {
    return "rows of b_scales lie at odd addresses, the kernel reads them in pairs";
  }
  const int64_t bytes = scales.shape[1] * scales.stride();
  if (bytes < int64_t{1} << 31) return {};
  return concat("b_scales of a matrix take ", bytes, " bytes, the kernel counts to 2^31");
}

// Scales [G, n, k / 32], or [G, k / 32, n] of weights whose last dimension is n.
ColumnScales column_scales(const TensorView& scales, bool is_k_last) {
  const auto stride = static_cast<int32_t>(scales.stride());
  const auto rows = static_cast<int32_t>(scales.shape[1]);
  const auto columns = static_cast<int32_t>(scales.shape[2]);
  const auto* const data = static_cast<const uint8_t*>(scales.data);
  const int64_t group = int64_t{rows} * stride;
  if (is_k_last) return {data, group, stride, 1, rows - 1, columns - 1};
  return {data, group, 1, stride, columns - 1, rows - 1};
}

// Calls f.operator()<P, kWeights>(cost) with the tile, and with how the weights lie.
template <class F>
decltype(auto) with_tile(const DeviceState& state, const GroupedGemmArgs& args, F&& f) {
  const auto with = [&]<Major kWeights>(auto tiles) -> decltype(auto) {
    return with_cheapest(tiles, sizes(args), state.num_multiprocessors,
                         [&]<class P>(const Cost& cost) -> decltype(auto) {
                           return f.template operator()<P, kWeights>(cost);
                         });
  };
  return is_k_major(args) ? with.template operator()<Major::kK>(DecodingTiles())
                          : with.template operator()<Major::kMN>(TurnedDecodingTiles());
}

struct Call : RaggedMCall<GroupedGemmArgs> {
  Call(const DeviceState& device, const GroupedGemmArgs& given, const Workspace& workspace)
      : RaggedMCall(device, given, given.a, given.b, workspace) {}

  Reason supports() const {
    const Weight b(args.b);
    return first_of({why_not_device(state), why_not_mxfp8(b.tensor, args.b_scales),
                     why_not_scales(args.b_scales, is_k_major(args)),
                     why_not_type(DType::kBF16, {{"a", args.a}, {"d", args.d}}),
                     why_not_listed("b", b), why_not_sizes(args.groups, b.tensor),
                     why_not_tma({{"a", args.a}, {"b", b.tensor}, {"d", args.d}})});
  }
  std::string policy() const {
    return concat("weight decoded in registers, ", with_tile(state, args, PolicyText()),
                  preparation());
  }
  Status run(const Context& context, const char* op = "grouped_gemm") const {
    Launcher launcher(context, op);
    if (args.groups.capacity == 0) return launcher.status();
    prepare(launcher);
    with_tile(state, args,
              [&]<class P, Major kWeights>(const Cost&) { launch_policy<P, kWeights>(launcher); });
    return launcher.status();
  }

 private:
  template <class P, Major kWeights>
  void launch_policy(Launcher& launcher) const {
    TensorMaps maps(launcher);
    const TensorView a(rows.rows());
    const Matrices b{Weight(args.b)};
    const auto store = store_of<P, StoreTurned<kWeights>>(maps, args);
    const int32_t box = std::min(64, box_rows<P>(args.groups));
    const DecodingRaggedM<kWeights> operands{
        maps.matrix("a", a, box),
        box,
        maps.matrices("b", b, kWeights == Major::kK ? P::kTileN : P::kTileK, 64),
        column_scales(args.b_scales, kWeights == Major::kK),
        store.n,
        static_cast<int32_t>(a.columns()),
        args.tail == MOIRE_TAIL_ZERO};
    launch<P>(launcher, sizes(args), args.groups, operands, store, numbers(b, listed));
  }
};

}  // namespace

const Product kGroupedGemm = product_of<Call>("sm90");

}  // namespace moire::cuda::sm90::decoding
