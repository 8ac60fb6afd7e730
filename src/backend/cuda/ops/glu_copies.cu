// The activation, and its FP8 copies, in one pass: a source of quantize's kernel; which calls are
// such, of the backward too.
#include "backend/cuda/ops/glu_copies.h"
#include "backend/cuda/ops/glu_gating.cuh"
#include "backend/cuda/ops/quantize.h"
#include "backend/cuda/ops/quantize_kernel.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "core/glu_storage.h"

namespace moire::cuda::ops {
namespace {

// The eight rows of a part of MXFP8, in memory that is the thread's own: with them in registers too
// few threads would be at work.
struct KeptEights {
  static constexpr int kRows = TilePart<MOIRE_SCALING_MXFP8>::kRows;
  static constexpr int kThreads = TileShape<MOIRE_SCALING_MXFP8>::kThreads;
  uint32_t first;

  __device__ KeptEights() {
    __shared__ uint4 pieces[kRows][kThreads];
    first = ptx::shared_address(&pieces[0][threadIdx.x]);
  }
  __device__ Eight<__nv_bfloat16> operator[](int i) const { return eight_at(address(i)); }
  __device__ void set(int i, const Packed8& eight) {
    const auto words = bits_as<uint4>(eight);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address(i)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w));
  }

 private:
  __device__ uint32_t address(int i) const {
    return first + static_cast<uint32_t>(i * kThreads * sizeof(uint4));
  }
};

// Rows of act, computed where quantize's kernel reads its source.
template <class Columns>
struct ActivationRows {
  using Element = __nv_bfloat16;
  static constexpr bool kVectors = true;
  template <int kRows>
  using Rows = std::conditional_t<kRows == KeptEights::kRows, KeptEights, Eight<Element>[kRows]>;
  static constexpr int kPieces = Columns::kIsGated ? 2 : 1;  // of eight columns of F
  static constexpr size_t kAskedBytes = 4 * kPieces * kLongThreads * sizeof(uint4);
  Gating<Columns> gating;
  int columns;

  __device__ int64_t named_row(int64_t row, const Reporter&) const { return row; }
  template <int kScaling, class Values>
  __device__ void load(const TilePart<kScaling>& tile, const Reporter&, Values& values) const {
    activate(tile, values, [&](int i, Packed8& gate, Packed8& up) {
      load_glu(gating.columns, gating.z.row(tile.row(i)), static_cast<uint32_t>(tile.column), gate,
               up);
    });
  }
  // The same of pieces of z that this thread has asked for.
  template <int kScaling>
  __device__ void ask(const TilePart<kScaling>& tile, const Reporter&) const {
    const auto column = static_cast<uint32_t>(tile.column);
    const uint32_t first = gating.columns.first(column);
    const __nv_bfloat16* p = gating.z.row(tile.row(0));
#pragma unroll
    for (int i = 0; i < TilePart<kScaling>::kRows; ++i, p += gating.z.stride) {
      ptx::copy_async(&asked(kPieces * i), p + first, tile.has_row(i));
      if constexpr (Columns::kIsGated) {
        ptx::copy_async(&asked(kPieces * i + 1), p + gating.columns.second(column),
                        tile.has_row(i));
      }
    }
  }
  template <int kScaling, class Values>
  __device__ void take(const TilePart<kScaling>& tile, Values& values) const {
    activate(tile, values, [&](int i, Packed8& gate, Packed8& up) {
      const auto first = bits_as<Packed8>(asked(kPieces * i));
      if constexpr (Columns::kIsGated) {
        gating.columns.split(first, bits_as<Packed8>(asked(kPieces * i + 1)), gate, up);
      } else {
        gating.columns.split(first, first, gate, up);
      }
    });
  }
  template <int kScaling, class Place>
  __device__ void fetch(const TilePart<kScaling>& tile, const Reporter& reporter,
                        Place&& place) const {
    Eight<Element> values[TilePart<kScaling>::kRows];
    load(tile, reporter, values);
#pragma unroll
    for (int i = 0; i < TilePart<kScaling>::kRows; ++i) place(i) = values[i];
  }

 private:
  __device__ static uint4& asked(int i) {
    return dynamic_shared<uint4>()[i * kLongThreads + threadIdx.x];
  }
  template <class Tile, class Values, class Read>
  __device__ void activate(const Tile& tile, Values& values, Read&& read) const {
    with_gating<Columns::kIsGated>(gating.activation, [&](const auto& activation) {
#pragma unroll
      for (int i = 0; i < Tile::kRows; i += 2) activate_two(activation, tile, i, values, read);
    });
  }
  // Rows that are not there become zeros.
  template <class Activation, class Tile, class Values, class Read>
  __device__ void activate_two(const Activation& activation, const Tile& tile, int first,
                               Values& values, Read&& read) const {
    Packed8 gate[2], up[2], act;
    float probs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gate[i] = up[i] = {};
      probs[i] = 0;
      if (!tile.has_row(first + i)) continue;
      read(first + i, gate[i], up[i]);
      probs[i] = gating.prob(tile.row(first + i));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        act.set(j, glu_value(activation, gate[i][j], up[i][j]) * probs[i]);
      }
      keep(values, first + i, act);
    }
  }
  static __device__ void keep(KeptEights& rows, int i, const Packed8& act) { rows.set(i, act); }
  template <int kRows>
  static __device__ void keep(Eight<Element> (&rows)[kRows], int i, const Packed8& act) {
    rows[i] = bits_as<Eight<Element>>(act);
  }
};

int64_t f_of(const GluArgs& glu) { return TensorView(glu.z).columns() / num_halves(glu.layout); }

constexpr int64_t kTile = 128;

// Whether eight columns of F are whole pieces of z.
bool takes_pieces(const ResolvedGluLayout& layout, const TensorView& z) {
  if (layout.f % kEight != 0 || !opens_vectors({z})) return false;
  return !layout.is_gated || layout.block == 1 || layout.block % kEight == 0;
}
// Whether tiles of 128 columns of z are made of whole tiles of F; or, of MXFP8, of whole blocks
// where there is a tile less at the end of halves.
bool takes_tiles(const ResolvedGluLayout& layout, bool is_mx) {
  if (!layout.is_gated || layout.block % kTile == 0) return true;
  if (kTile / 2 % layout.block == 0) return true;
  return is_mx && layout.block == layout.f && layout.f >= kTile && layout.f % 32 == 0;
}

bool is_taken(const moire_quantized& copy, int32_t direction, const moire_groups& groups) {
  if (!is_present(copy)) return true;
  return opens_eights(copy, direction) &&
         (direction == MOIRE_ROWWISE || !why_not_transposed("", copy, groups));
}
// Of MXFP8 the backward makes values alone.
bool is_taken_backward(const moire_quantized& copy, int32_t direction, const moire_groups& groups,
                       bool is_mx) {
  if (!is_present(copy)) return true;
  return is_taken(copy, direction, groups) && is_values(copy) == is_mx &&
         (is_mx || scaling_of(copy) == MOIRE_SCALING_FP8_BLOCK);
}

// Whether both lie transposed, or neither.
bool lie_alike(const moire_quantized& a, const moire_quantized& b, const moire_groups& groups) {
  if (!is_present(a) || !is_present(b)) return true;
  return is_transposed(a.data, a.scales, groups) == is_transposed(b.data, b.scales, groups);
}

}  // namespace

bool leaves_copies(const GroupedGemmGluArgs& args) {
  const int64_t f = Weight(args.b).out_features() / num_halves(args.layout);
  return !is_present(args.act) && glu_storage(args) == DType::kBF16 &&
         (is_present(args.act_rowwise) || is_present(args.act_columnwise)) &&
         is_taken(args.act_rowwise, MOIRE_ROWWISE, args.groups) &&
         is_taken(args.act_columnwise, MOIRE_COLUMNWISE, args.groups) &&
         takes_pieces(resolve_glu_layout(args.layout, f), args.z);
}

bool leaves_copies(const GroupedGemmGluBackwardArgs& args) {
  const ResolvedGluLayout layout = resolve_glu_layout(args.layout, Weight(args.w2).in_features());
  const bool is_mx = is_present(args.grad_z_rowwise) ? is_values(args.grad_z_rowwise)
                                                     : is_values(args.grad_z_columnwise);
  return !is_present(args.grad_z) && !is_present(args.act) &&
         TensorView(args.z).type() == DType::kBF16 &&
         (is_present(args.grad_z_rowwise) || is_present(args.grad_z_columnwise)) &&
         is_taken_backward(args.grad_z_rowwise, MOIRE_ROWWISE, args.groups, is_mx) &&
         is_taken_backward(args.grad_z_columnwise, MOIRE_COLUMNWISE, args.groups, is_mx) &&
         is_taken_backward(args.act_columnwise, MOIRE_COLUMNWISE, args.groups, is_mx) &&
         lie_alike(args.grad_z_columnwise, args.act_columnwise, args.groups) &&
         takes_pieces(layout, args.z) && takes_tiles(layout, is_mx);
}

Reason GluCopies::supports() const {
  if (const Reason reason = why_not_mixed(act)) return reason;
  return too_wide("act", f_of(glu));
}

Status GluCopies::run(const Context& context) const {
  constexpr const char* kOp = "grouped_gemm_glu";
  Launcher launcher(context, kOp);
  const int64_t f = f_of(glu);
  const TensorView shape(nullptr, DType::kBF16, {TensorView(glu.z).num_rows(), f});
  const ScaleBlocks blocks =
      scale_blocks(shape, act.groups, act.scaling, is_present(act.columnwise));
  const auto notes = non_finite_reporter(context, {kOp, "act"}, shape, false);
  with_pieces(resolve_glu_layout(glu.layout, f), [&]<class Columns>(const Columns& columns) {
    using Source = ActivationRows<Columns>;
    QuantizeTiles<Source> tiles{.source = {gating_of(glu, columns), static_cast<int>(f)}};
    set_copies(tiles, act, blocks);
    with_ragged_scaling(act, [&]<int kScaling>() {
      launch_quantize<kScaling, Source>(launcher, tiles, shape, notes);
    });
  });
  return launcher.status();
}

}  // namespace moire::cuda::ops
