// Operands: the memory of one problem's tensors, filled from its seed. A tensor's data depend on
// seed and name only, so that every op of a problem sees the same x and W1. arguments.h says which
// there are.
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "problem.h"

namespace moire::tool {

// Standard normal numbers times `scale`, the same for the same seed: a period of them, repeated.
void fill_normal(const TensorView& t, uint64_t seed, double scale = 1);

class Operands {
 public:
  enum class Content {
    kNone,    // addresses only, for explain
    kNormal,  // what a model would hold
    kHostile  // the same, and NaN wherever nothing may be read: tails, outputs, workspaces
  };
  using Shape = std::vector<int64_t>;
  Operands(const Problem& problem, Content content);

  const Problem& problem() const { return problem_; }
  bool has_content() const { return content_ != Content::kNone; }
  // Whether results are going to be compared with the reference.
  bool is_judged() const { return content_ == Content::kHostile; }
  const std::vector<int64_t>& splits() const { return splits_; }
  Groups groups() const { return groups_; }
  int64_t group_of(int64_t row) const;
  // The routing that gives these splits; empty where nothing is filled.
  const std::vector<int64_t>& expert_of_choice() const { return expert_of_choice_; }
  const std::vector<int64_t>& token_of_row() const { return token_of_row_; }
  const std::vector<int64_t>& row_of_choice() const { return row_of_choice_; }

  // Memory alone, zeroed.
  TensorView take(const std::string& name, DType dtype, const Shape& shape);
  // What a call overwrites: hostile, NaN, or an index that is nowhere.
  TensorView output(const std::string& name, DType dtype, const Shape& shape);
  Workspace workspace(size_t bytes);
  // What arguments point at that is read on the host, kept as long as this.
  template <class T>
  const T* keep(std::vector<T> list) {
    const auto kept = std::make_shared<std::vector<T>>(std::move(list));
    lists_.push_back(kept);
    return kept->data();
  }

  // Each fills nothing where there is no content. Standard normal numbers times `scale`:
  void fill_normal(const TensorView& t, const std::string& name, double scale) const;
  // In (0, 1), FP32:
  void fill_uniform(const TensorView& t, const std::string& name) const;
  void fill_indices(const TensorView& t, const std::vector<int64_t>& values) const;
  // FP8 codes of normal numbers times reach(dtype), of which few saturate, and E8M0 or FP32 scales
  // around `scale` that differ from block to block. A row of scales belongs to one row of the batch
  // (`block_rows` 1), to so many rows of a group, or (0) to any; hostile ones are NaN where no row
  // in use has them. Calls that only decode take, if hostile, codes of any number below 2 and
  // scales of many sizes.
  enum class Values { kNormal, kAny };
  void fill_codes(const TensorView& t, const std::string& name, Values values) const;
  void fill_scales(const TensorView& t, const std::string& name, Values values, double scale,
                   int64_t block_rows) const;
  static double reach(DType element) { return element == DType::kE4M3 ? 0x1p6 : 0x1p13; }
  // If hostile: NaN, or nowhere, from a row on; from the first past the last group.
  void poison(const TensorView& t, int64_t first_row = 0) const;
  void poison_tail(const TensorView& t) const;

  int64_t bytes() const { return memory_.bytes(); }
  static constexpr int64_t kRoutingBytes = 32;  // beside it, for a row or a dropped choice
  std::string first_broken_guard() const { return memory_.first_broken_guard(); }

 private:
  void route();

  Problem problem_;
  Content content_;
  Memory memory_;
  std::vector<int64_t> splits_;
  std::vector<int64_t> offsets_;
  Groups groups_;
  std::vector<int64_t> expert_of_choice_, token_of_row_, row_of_choice_;
  std::vector<std::shared_ptr<void>> lists_;
};

}  // namespace moire::tool
