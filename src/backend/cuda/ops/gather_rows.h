// Rows brought into expert order, for permute and for kernels that load neighbouring rows.
#pragma once

#include "backend/cuda/runtime/launch.h"
#include "core/arena.h"

namespace moire::cuda::ops {

// rows_i = x[index_i] for each row in use, of one dtype; the tail gets zeros or stays. An index
// outside x is reported under the launcher's op and `index_name`, a literal.
void gather_rows(Launcher& launcher, const TensorView& x, const TensorView& index,
                 const char* index_name, const TensorView& rows, const moire_groups& groups,
                 int32_t tail);

// Rows that are given through an index, in expert order, for kernels that load whole boxes of
// neighbouring rows: so they are first copied into the workspace.
class GatheredRows {
 public:
  // Takes its part of the workspace where row_idx is present.
  GatheredRows(const TensorView& source, const TensorView& row_idx, const moire_groups& groups,
               Arena& arena)
      : source_(source), row_idx_(row_idx), groups_(groups), rows_(source) {
    if (row_idx.is_present()) {
      rows_ = arena.take_aligned(source.type(), groups.capacity, source.columns());
    }
  }

  // [capacity, columns].
  const TensorView& rows() const { return rows_; }

  // `name` is the index's, for what kernels find wrong with it.
  void gather(Launcher& launcher, const char* name = "row_idx") const {
    if (!row_idx_.is_present()) return;
    gather_rows(launcher, source_, row_idx_, name, rows_, groups_, MOIRE_TAIL_UNTOUCHED);
  }

  // For explain: what comes before the kernel, in words and in launches.
  int64_t launches() const { return row_idx_.is_present() ? 1 : 0; }
  std::string policy() const {
    return row_idx_.is_present() ? ", after copying the rows into expert order" : "";
  }

 private:
  TensorView source_, row_idx_;
  moire_groups groups_;
  TensorView rows_;
};

}  // namespace moire::cuda::ops
