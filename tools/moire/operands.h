// Operands: the tensors of one problem, made on request and filled from its seed. A tensor's data
// depend on seed and name only, so that every op of a problem sees the same x and W1.
#pragma once

#include <moire/groups.h>
#include <moire/tensor.h>

#include <deque>
#include <string>
#include <vector>

#include "memory.h"
#include "problem.h"

namespace moire::tool {

// Of a tensor's name: what its data differ by.
inline uint64_t hash(const std::string& name) {  // FNV-1a
  uint64_t h = 0xCBF29CE484222325ULL;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return h;
}

class Operands {
 public:
  enum class Content {
    kNone,    // addresses only, for explain
    kNormal,  // what a model would hold
    kHostile  // the same, and NaN wherever nothing may be read: tails, outputs, workspaces
  };
  Operands(const Problem& problem, Content content);

  const Problem& problem() const { return problem_; }
  // Whether operands hold anything: else nobody may read them.
  bool is_filled() const { return content_ != Content::kNone; }
  // Whether results are going to be compared with the reference.
  bool is_judged() const { return content_ == Content::kHostile; }
  const std::vector<int64_t>& splits() const { return splits_; }
  Groups groups() const { return groups_; }
  int64_t group_of(int64_t row) const;

  // Standard normal times `scale`; of a ragged tensor, rows past the last group are hostile.
  TensorView input(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                   double scale = 1.0);
  // [capacity, columns] in expert order; or [T, columns] if the problem gathers.
  TensorView ragged(const std::string& name, DType dtype, int64_t columns);
  TensorView gathered(const std::string& name, int64_t columns) {
    return gathered(name, problem_.stored(), columns);
  }
  TensorView gathered(const std::string& name, DType dtype, int64_t columns);
  // [capacity] in (0, 1), FP32; absent if the problem has no probs.
  TensorView probs();
  TensorView topk_weights();
  TensorView bias(const std::string& name, int64_t columns);
  moire_weight weight(const std::string& name, int64_t out, int64_t in) {
    return weight(name, problem_.stored(), out, in);
  }
  moire_weight weight(const std::string& name, DType dtype, int64_t out, int64_t in);

  // FP8 codes [capacity, columns] or of weights: of normal numbers; hostile: any of numbers
  // below 2.
  TensorView codes(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  // Random scales, E8M0 or FP32: as quantize makes them of numbers of one size; hostile: of many
  // sizes. A row of them belongs to one row of the batch (`block_rows` 1), to so many rows of a
  // group, or (0) to weights; NaN, in hostile ones, where no row in use has it.
  TensorView scales(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                    int64_t block_rows);

  // Operands of products: as above, or FP8 with scales along `direction` where the format has
  // them. Columnwise ones are in expert order.
  struct Scaled {
    TensorView data, row_idx, scales;
  };
  enum class Kind { kActivation, kGradient };
  Scaled ragged_operand(const std::string& name, Kind kind, Format format, int64_t columns,
                        int32_t direction, bool gathers);
  struct ScaledWeight {
    moire_weight weight;
    TensorView scales;
  };
  // A quantised copy of [capacity, columns] to be written; absent where the problem does not
  // quantise.
  moire_quantized quantized_output(const std::string& name, Kind kind, int64_t columns,
                                   int32_t direction);
  // In the problem's format of b. Products contract over `in`, or over `out`.
  ScaledWeight weight_operand(const std::string& name, int64_t out, int64_t in, bool over_in);

  // Overwritten by a call; hostile ones are NaN, or an index that is nowhere.
  TensorView output(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  // Read and written where beta says so.
  TensorView accumulator(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                         bool accumulates);
  // [capacity] FP32 in expert order.
  TensorView row_accumulator(const std::string& name, bool accumulates);
  moire_weight weight_gradient(const std::string& name, int64_t out, int64_t in);
  const uint8_t* beta_per_group();  // null unless beta is mixed

  // The routing that gives these splits: choice -> expert, row -> token, choice -> row.
  TensorView topk_idx();
  TensorView gather_idx();
  TensorView scatter_idx();
  TensorView row_idx();  // gather_idx, or absent if the problem does not gather
  TensorView index(const std::string& name, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& values);
  // INT64 offsets, INT32 ends, and INT64 offsets in elements of rows of x.
  static constexpr int64_t kNumOffsetOutputs = 3;
  const OffsetsOutput* offset_outputs();

  Workspace workspace(size_t bytes);
  DType out_dtype() const;    // of a GEMM's result
  DType wgrad_dtype() const;  // of weight gradients
  int64_t bytes() const { return memory_.bytes(); }
  std::string first_broken_guard() const { return memory_.first_broken_guard(); }

 private:
  bool is_hostile() const { return content_ == Content::kHostile; }
  TensorView take(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  moire_weight take_weight(const std::string& name, DType dtype, int64_t out, int64_t in);
  void fill_normal(const TensorView& t, const std::string& name, double scale) const;
  void fill_codes(const TensorView& t, const std::string& name) const;
  void fill_scales(const TensorView& t, const std::string& name, double scale, int64_t first,
                   int64_t count) const;
  void poison(const TensorView& t, int64_t first_row = 0) const;
  void poison_tail(const TensorView& t) const;
  void route();

  Problem problem_;
  Content content_;
  Memory memory_;
  std::vector<int64_t> splits_;
  std::vector<int64_t> offsets_;
  Groups groups_;
  std::vector<int64_t> expert_of_choice_, token_of_row_, row_of_choice_;
  std::vector<uint8_t> betas_;
  std::vector<OffsetsOutput> offset_outputs_;
  std::deque<std::vector<const void*>> lists_;
};

}  // namespace moire::tool
