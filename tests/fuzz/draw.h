// Draw: a visitor of moire/fields.h that fills a struct with a random call which mostly succeeds:
// tensors of the sizes that the fields have, in memory of their own, with the contents that their
// names ask for.
#pragma once

#include <moire/fields.h>

#include <cstdint>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/memory.h"
#include "tests/fuzz/plan.h"
#include "tests/fuzz/random.h"

namespace moire::fuzz {

class Draw {
 public:
  Draw(Random& random, const Plan& plan, Memory& memory)
      : random_(random), plan_(plan), memory_(memory) {}

  template <class A>
  void fill(A& args) {
    // Fields that others' roles and sizes depend on.
    if constexpr (requires { args.transpose_b; }) args.transpose_b = plan_.transposes;
    if constexpr (requires { args.gathered_grad_y; }) args.gathered_grad_y = plan_.gathers_grad_y;
    if constexpr (requires { args.act_is_saved; }) args.act_is_saved = plan_.saves_act;
    is_layer_ = requires { args.recipe; };
    is_backward_ = requires { args.grad_y; };
    is_wgrad_ = requires { args.a_row_idx; };
    is_router_ = requires { args.logits; };
    is_requantize_ = std::derived_from<A, moire_requantize_args>;
    may_be_weight_ = is_requantize_ || std::derived_from<A, moire_dequantize_args>;
    quantizes_weight_ = std::derived_from<A, moire_quantize_weight_args>;
    may_lack_groups_ = may_be_weight_ || std::derived_from<A, moire_quantize_args> ||
                       std::derived_from<A, moire_glu_args> ||
                       std::derived_from<A, moire_glu_backward_args>;
    index_dtype_ = random_.percent(50) ? MOIRE_INT32 : MOIRE_INT64;
    element_ = random_.pick<int32_t>({MOIRE_FP32, MOIRE_BF16, MOIRE_UINT8, MOIRE_FP64});
    visit_fields(args, *this);
  }

  void field(const char* name, moire_tensor& t, Role role, const char* sizes);
  void field(const char* name, moire_weight& w, Role role, const char* sizes);
  void field(const char* name, moire_quantized& q, Role role, const char* sizes);
  void field(const char* name, const uint8_t*& bytes, Role role, int64_t count);
  void field(const char* name, const moire_offsets_output*& outputs, Role role, int64_t& count);
  void field(const char* name, moire_groups& groups);
  void field(const char*, moire_workspace&) {}  // sized once all is there

  void value(const char* name, int32_t& value, int count = 0);
  void value(const char* name, int64_t& value, int = 0);
  void value(const char* name, float& value, int = 0);
  void value(const char* name, moire_activation& value, int = 0);
  void value(const char* name, moire_glu_layout& value, int = 0);

 private:
  bool wants(std::string_view name, Role role);
  int32_t dtype_of(std::string_view name, std::string_view sizes);
  int32_t any_float() { return random_.pick<int32_t>({MOIRE_FP32, MOIRE_BF16, MOIRE_FP16}); }
  int32_t any_fp8() { return random_.pick<int32_t>({MOIRE_E4M3, MOIRE_E5M2}); }
  bool is_gathered(std::string_view name) const;
  bool is_fp8(std::string_view name) const;
  int32_t weight_scaling() const;
  bool draws_weights() const { return may_be_weight_ && plan_.is_weight; }
  std::vector<int64_t> shape_of(std::string_view name, std::string_view sizes) const;

  void take(const std::string& name, moire_tensor& t, int32_t dtype, std::span<const int64_t> shape,
            bool may_pad = true);
  void take_scales(const std::string& name, moire_tensor& t, std::span<const int64_t> data,
                   int32_t scaling, int32_t direction);
  void scales_of_operand(const char* name, moire_tensor& t);
  void fill_elements(moire_tensor& t);
  void fill_indices(std::string_view name, moire_tensor& t);
  void fill_element(int32_t dtype, void* at);

  Random& random_;
  const Plan& plan_;
  Memory& memory_;
  std::set<std::string, std::less<>> present_;
  std::vector<int64_t> shape_a_, shape_b_;  // of operands that have scales
  bool is_layer_ = false, is_backward_ = false, is_wgrad_ = false, is_router_ = false,
       is_requantize_ = false, may_be_weight_ = false, quantizes_weight_ = false,
       may_lack_groups_ = false;
  int32_t index_dtype_ = 0, element_ = 0;
};

}  // namespace moire::fuzz
