// grouped_gemm_wgrad on CUDA, the plain way: k runs over the rows of a group; d = round(sum), or
// round(d + sum) where the group accumulates. A block per group and 64 x 64 of its matrix.
#include "backend/cuda/portable/ragged_m.cuh"

namespace moire::cuda::portable {
namespace {

// One ragged operand, perhaps gathered.
struct Side {
  gemm::Operand matrix;
  Indices row_idx;
  int64_t num_source_rows;
  int64_t columns;
};

struct Operands {
  Side a, b;
  AnyFloats d;
  void* const* listed;  // its groups' matrices; null: one after the other
  int32_t beta;
  const uint8_t* beta_per_group;  // or null
  moire_groups groups;
  uint32_t tiles_n, tiles;  // of a group's matrix
};

// The source row of a group's row k.
struct SourceRow {
  Indices row_idx;
  int64_t num_source_rows;
  int64_t first;  // row of the group
  Reporter reporter;

  __device__ int64_t operator()(int64_t k) const {
    if (!row_idx.is_present()) return first + k;
    return checked_index(row_idx, first + k, row_idx.at(first + k), num_source_rows,
                         Dropping::kForbidden, reporter);
  }
};

template <class Engine>
__device__ typename Engine::template AcrossK<SourceRow> side_of(const Side& side, int64_t group,
                                                                int64_t first_column,
                                                                const RowRange& rows,
                                                                const Reporter& reporter) {
  int64_t columns[Engine::kColumns];
#pragma unroll
  for (int i = 0; i < Engine::kColumns; ++i) {
    const int64_t column = first_column + Engine::first_column() + i;
    columns[i] = column < side.columns ? column : -1;
  }
  const SourceRow row_of{side.row_idx, side.num_source_rows, rows.begin, reporter};
  const int64_t first_scale_row = (rows.begin >> side.matrix.scales.row_shift) + group;
  return {gemm::of_group(side.matrix, rows.begin, first_scale_row), row_of, columns, rows.size()};
}

template <class Engine>
__global__ void __launch_bounds__(gemm::kThreads, 2)
    wgrad_kernel(Operands args, Reporter reporter) {
  using Memory = gemm::Shared<Engine, 1, 1>;
  if (blockIdx.x == 0) check_groups(args.groups, reporter, threadIdx.x, gemm::kThreads);
  const int64_t group = blockIdx.x / args.tiles;
  const uint32_t tile = blockIdx.x % args.tiles;
  const int64_t first_m = int64_t{tile / args.tiles_n} * gemm::kTile;
  const int64_t first_n = int64_t{tile % args.tiles_n} * gemm::kTile;
  const RowRange rows = rows_of(args.groups, group);
  const bool accumulates =
      args.beta_per_group != nullptr ? args.beta_per_group[group] != 0 : args.beta != 0;
  // Adding the zeros of an empty group would turn -0 into +0.
  if (accumulates && rows.size() == 0) return;
  typename Engine::template AcrossK<SourceRow> right[] = {
      side_of<Engine>(args.b, group, first_n, rows, reporter)};
  Engine::template multiply<Memory>(side_of<Engine>(args.a, group, first_m, rows, reporter), right,
                                    rows.size());
  const int64_t m = first_m + gemm::epilogue_row();
  if (m >= args.a.columns) return;
  AnyFloats d = args.d;
  if (args.listed != nullptr) d.data = args.listed[group];
  const int64_t row = args.listed != nullptr ? m : group * args.a.columns + m;
  gemm::for_own_columns([&](int column, int) {
    const int64_t n = first_n + column;
    if (n >= args.b.columns) return;
    const float sum = Memory::plane(0)[gemm::epilogue_row()][column];
    d.set(row, n, accumulates ? d.at(row, n) + sum : sum);
  });
}

Side side(const TensorView& matrix, const TensorView& scales, const TensorView& row_idx,
          const char* name) {
  return {gemm::columnwise(matrix, scales), indices_of(row_idx, name), matrix.num_rows(),
          matrix.columns()};
}

struct Call : PlannedCall<GroupedGemmWgradArgs> {
  Call(const DeviceState& device, const GroupedGemmWgradArgs& given, const Workspace& workspace)
      : PlannedCall(device, given, workspace), listed(args.d, arena) {
    const TensorView a(args.a), b(args.b);
    if (is_transposed(b, args.b_scales, args.groups)) transposed = "b";
    if (is_transposed(a, args.a_scales, args.groups)) transposed = "a";
    const uint32_t tiles_n = blocks_for(b.columns(), gemm::kTile);
    operands = {.a = side(a, args.a_scales, args.a_row_idx, "a_row_idx"),
                .b = side(b, args.b_scales, args.b_row_idx, "b_row_idx"),
                .d = any_floats(args.d.tensor),
                .listed = listed.addresses(),
                .beta = args.beta,
                .beta_per_group = args.beta_per_group,
                .groups = args.groups,
                .tiles_n = tiles_n,
                .tiles = blocks_for(a.columns(), gemm::kTile) * tiles_n};
  }

  Reason supports() const {
    if (transposed != nullptr) {
      return concat(transposed, " lies transposed, as FP8 tensor cores alone read it");
    }
    const Reason reason = gemm::why_not_width(operands.a.columns);
    return reason ? reason : gemm::why_not_width(operands.b.columns);
  }
  std::string policy() const {
    return gemm::policy_text(operands.a.matrix, operands.b.matrix) + listed.policy();
  }
  int64_t launches() const { return 1 + listed.launches(); }
  Status run(const Context& context) const {
    Launcher launcher(context, "grouped_gemm_wgrad");
    listed.write(launcher);
    const uint32_t blocks = blocks_for(operands.groups.num_groups * operands.tiles, 1);
    gemm::with_engine(operands.a.matrix, operands.b.matrix, [&]<class Engine>() {
      launcher.launch(wgrad_kernel<Engine>,
                      {blocks, gemm::kThreads, gemm::Shared<Engine, 1, 1>::kBytes}, operands,
                      launcher.reporter());
    });
    return launcher.status();
  }

  ops::ListedMatrices listed;
  Operands operands;
  const char* transposed = nullptr;  // the operand that lies so, if one does
};

}  // namespace

const Implementation<GroupedGemmWgradArgs> kGroupedGemmWgrad =
    implementation_of<GroupedGemmWgradArgs, Call>("portable");

}  // namespace moire::cuda::portable
