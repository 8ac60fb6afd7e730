// Before: what tensors hold now, for a reference that runs after the call that overwrites them.
#pragma once

#include <moire/tensor.h>

#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

namespace moire::tool {

class Before {
 public:
  // The same view of a copy.
  moire_tensor of(const moire_tensor& t) {
    moire_tensor copy = t;
    if (is_present(t)) copy.data = copy_of(t.data, t);
    return copy;
  }
  moire_weight of(const moire_weight& w) {
    moire_weight copy = w;
    if (w.list == nullptr) {
      copy.tensor = of(w.tensor);
      return copy;
    }
    std::vector<const void*>& list = lists_.emplace_back();
    for (int64_t g = 0; g < w.tensor.shape[0]; ++g) {
      const TensorView matrix = Weight(w).matrix(g);
      list.push_back(copy_of(matrix.data, matrix));
    }
    copy.list = list.data();
    return copy;
  }

 private:
  void* copy_of(const void* data, const TensorView& t) {
    const int64_t rows = t.rank == 1 ? 1 : t.num_rows();
    const int64_t elements = rows == 0 ? 0 : (rows - 1) * t.stride() + t.columns();
    std::vector<std::byte>& memory =
        memory_.emplace_back(static_cast<size_t>(elements * dtype_size(t.type())));
    if (!memory.empty()) std::memcpy(memory.data(), data, memory.size());
    return memory.data();
  }

  std::deque<std::vector<std::byte>> memory_;
  std::deque<std::vector<const void*>> lists_;
};

}  // namespace moire::tool
