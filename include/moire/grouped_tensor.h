// GroupedTensor: a batch of matrices in FP8 with its scales, as one value. A view, an owner of CPU
// memory beside it, and the quantised weights of a layer, kept from one weight update to the next.
#pragma once

#include <moire/buffer.h>
#include <moire/glu.h>
#include <moire/groups.h>
#include <moire/quantize.h>

#include <cstdint>

namespace moire {

// Ragged [rows, k] in groups, or uniform [G, n, k]. Every matrix has the same k and the same
// format; a ragged last dimension, or matrices of several shapes, have no such view. Scales are
// shaped as moire_quantized says.
struct GroupedTensorView {
  int32_t scaling = MOIRE_SCALING_MXFP8;  // moire_scaling
  Quantized rowwise, columnwise;          // one or both; tiles are rowwise
  Groups groups;                          // of a ragged batch; absent: one group, all rows
  GluLayout layout;                       // where it is a gated FC1's weight or output
  bool has_layout = false;
  bool fractional_scales = false;  // FP8_BLOCK, FP8_TILE: what is written need not have powers of 2

  bool has_rowwise() const { return rowwise.is_present(); }
  bool has_columnwise() const { return columnwise.is_present(); }
  // The data of a direction that is there: its shape is the batch's.
  TensorView data() const { return has_rowwise() ? rowwise.data : columnwise.data; }
  bool is_ragged() const { return data().rank == 2; }
  int64_t num_matrices() const {
    if (!is_ragged()) return data().shape[0];
    return is_absent(groups) ? 1 : groups.num_groups;
  }
  // Whether one shape says that of every matrix. Rows divided by groups are ragged, whatever their
  // offsets are now: those may lie on a device, and are not read.
  MOIRE_API bool all_same_shape() const;
  // Bytes of elements and scales.
  MOIRE_API int64_t nbytes() const;
  // One matrix, without a copy; reads the offsets of a ragged batch. Itself a ragged batch of one
  // group, or a uniform one of one matrix. `group` is in 0 ... num_matrices() - 1.
  MOIRE_API GroupedTensorView matrix(int64_t group) const;
};

// Which copies a batch has, and how their elements are stored.
struct GroupedTensorOptions {
  int32_t scaling = MOIRE_SCALING_MXFP8;
  DType element = DType::kE4M3;
  bool rowwise = true, columnwise = false;
  bool fractional_scales = false;  // FP8_BLOCK, FP8_TILE: scales need not be powers of two
};

// A batch and its memory; elements and scales start as zeros. Moved, not copied; clone() copies.
class MOIRE_API GroupedTensor {
 public:
  // kInvalidArgument: sizes below zero, no direction, tiles of a ragged batch or columnwise. Groups
  // are referred to: their offsets must outlive this.
  static Result<GroupedTensor> ragged(const Groups& groups, int64_t k,
                                      const GroupedTensorOptions& options = {});
  static Result<GroupedTensor> uniform(int64_t num_groups, int64_t n, int64_t k,
                                       const GroupedTensorOptions& options = {});

  const GroupedTensorView& view() const { return view_; }
  operator const GroupedTensorView&() const { return view_; }
  void set_layout(const GluLayout& layout) {
    view_.layout = layout;
    view_.has_layout = true;
  }
  // The same bytes in memory of its own.
  Result<GroupedTensor> clone() const;

 private:
  Buffer memory_;
  GroupedTensorView view_;
};

// Every copy that `target` has, from `source` in one pass: [rows, k] (or [T, k] with row_idx), or
// the weights of all groups.
MOIRE_API Status quantize(const Context& context, const TensorView& source,
                          const GroupedTensorView& target, const TensorView& row_idx = {});
MOIRE_API Status quantize(const Context& context, const Weight& source,
                          const GroupedTensorView& target);
// From the rowwise copy if there is one.
MOIRE_API Status dequantize(const Context& context, const GroupedTensorView& source,
                            const TensorView& target);
// The direction that only `target` has, from the one that `source` has.
MOIRE_API Status requantize(const Context& context, const GroupedTensorView& source,
                            const GroupedTensorView& target);
// A gated FC1's weight [G, 2F, k] into target.layout, elements and scales, nothing requantised.
// Columnwise copies and tiles need blocks of gate and up that are whole blocks of scales (32 or
// 128): kInvalidArgument names the block otherwise, and a source or target without a layout.
MOIRE_API Status convert_glu(const Context& context, const GroupedTensorView& source,
                             const GroupedTensorView& target);

// The quantised copies of one layer's weights, for forward and dgrad: made when a version is new,
// at addresses that never change, so that a captured graph keeps reading them.
class MOIRE_API QuantizedWeight {
 public:
  // For weights [G, n, k] packed or listed; scaling MXFP8 (both directions) or FP8_TILE.
  // fractional_scales: as a recipe that reads the copies has it; FP8_TILE only.
  static Result<QuantizedWeight> create(int64_t num_groups, int64_t n, int64_t k, int32_t scaling,
                                        bool fractional_scales = false);
  // Prepared instead, for layers on such a context, in memory of its device: of weights like
  // args.w, which is not read yet. There are no copies then: view() and the like are absent.
  static Result<QuantizedWeight> create(const Context& context, const PrepareWeightArgs& args);

  // Quantises `weight` in one call for all groups unless `version` is that of the last update. The
  // caller counts versions: one per weight update.
  Status update(const Context& context, const Weight& weight, uint64_t version);

  const GroupedTensorView& view() const { return copies_.view(); }
  const moire_prepared_weight& prepared() const { return args_.prepared; }
  // The copy for a product along `in` (forward) or along `out` (dgrad) of a weight of this layout.
  Quantized for_forward(int32_t layout) const { return along(layout == MOIRE_OUT_IN); }
  Quantized for_dgrad(int32_t layout) const { return along(layout != MOIRE_OUT_IN); }

 private:
  Quantized along(bool last_dimension) const {
    const GroupedTensorView& v = copies_.view();
    return last_dimension || !v.has_columnwise() ? v.rowwise : v.columnwise;
  }
  GroupedTensor copies_;
  PrepareWeightArgs args_;  // where it is prepared
  Buffer memory_, workspace_;
  uint64_t version_ = 0;
  bool is_filled_ = false;
};

}  // namespace moire
