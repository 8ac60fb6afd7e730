// grouped_gemm on SM90: d = a * op(b) with a plain store. Weights are taken as they lie, K-major or
// not, so that the dgrad needs no transposed copy.
#include "backend/cuda/sm90/epilogues.cuh"
#include "backend/cuda/sm90/launch_grouped_gemm.cuh"

namespace moire::cuda::sm90 {
namespace {

struct Call : RaggedMCall<GroupedGemmArgs> {
  Call(const DeviceState& device, const GroupedGemmArgs& given, const Workspace& workspace)
      : RaggedMCall(device, given, given.a, given.b, workspace) {}

  Reason supports() const {
    const Weight b(args.b);
    const std::initializer_list<Named> tensors{{"a", args.a}, {"b", b.tensor}, {"d", args.d}};
    return first_of({why_not_device(state), why_not_type(DType::kBF16, tensors),
                     why_not_listed("b", b), why_not_sizes(args.groups, b.tensor),
                     why_not_tma(tensors)});
  }
  std::string policy() const {
    return policy_text<ProductTiles>(state, sizes(args)) + preparation();
  }
  Status run(const Context& context, const char* op = "grouped_gemm") const {
    Launcher launcher(context, op);
    if (args.groups.capacity == 0) return launcher.status();
    prepare(launcher);
    with_cheapest(ProductTiles(), sizes(args), state.num_multiprocessors,
                  [&]<class P>(const Cost&) {
                    is_k_major(args) ? launch_policy<P, Major::kK>(launcher)
                                     : launch_policy<P, Major::kMN>(launcher);
                  });
    return launcher.status();
  }

 private:
  template <class P, Major kWeights>
  void launch_policy(Launcher& launcher) const {
    TensorMaps maps(launcher);
    const Matrices b{Weight(args.b)};
    const auto store = store_of<P, Store>(maps, args);
    launch<P>(launcher, sizes(args), args.groups,
              ragged_m<P, kWeights>(maps, rows.rows(), args.groups, b, store.n, args.tail), store,
              numbers(b, listed));
  }
};

}  // namespace

const Product kGroupedGemm = product_of<Call>("sm90");

}  // namespace moire::cuda::sm90
