// Rows that are given through an index, in expert order: the kernels load whole boxes of
// neighbouring rows, so the rows are first copied into the workspace.
#pragma once

#include <moire/routing.h>

#include "backend/cuda/implementations.h"
#include "core/arena.h"

namespace moire::cuda::sm90 {

class GatheredRows {
 public:
  // Takes its part of the workspace where row_idx is present.
  GatheredRows(const TensorView& source, const TensorView& row_idx, const moire_groups& groups,
               Arena& arena)
      : source_(source), row_idx_(row_idx), groups_(groups), rows_(source) {
    if (row_idx.is_present()) {
      rows_ = arena.take(source.type(), groups.capacity, source.columns());
    }
  }

  // [capacity, columns].
  const TensorView& rows() const { return rows_; }

  Status gather(const Context& context) const {
    if (!row_idx_.is_present()) return {};
    PermuteArgs args;
    args.x = source_;
    args.gather_idx = row_idx_;
    args.rows = rows_;
    args.groups = groups_;
    args.tail = MOIRE_TAIL_UNTOUCHED;
    return portable::kPermute.run(context, args);
  }

  // For explain: what comes before the kernel.
  static std::string policy(const TensorView& row_idx) {
    return row_idx.is_present() ? ", after copying the rows into expert order" : "";
  }

 private:
  TensorView source_, row_idx_;
  moire_groups groups_;
  TensorView rows_;
};

}  // namespace moire::cuda::sm90
