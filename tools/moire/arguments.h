// The arguments of a problem's calls: a visitor of moire/fields.h that makes every field of a
// struct the operand that the op's row (ops.h) calls it. Shapes follow from the sizes that a field
// has, data from its name; wants() is the one place that says which optional fields a problem has.
#pragma once

#include <moire/fields.h>

#include <map>
#include <string>
#include <string_view>

#include "operands.h"

namespace moire::tool {

class Arguments {
 public:
  explicit Arguments(Operands& operands) : operands_(operands), problem_(operands.problem()) {}

  // Of one call. It reads what a former call of the same problem wrote.
  template <class A>
  A of(const OpCall& call) {
    call_ = &call;
    A args;
    for (const bool sets_values : {true, false}) {  // which decide about roles
      sets_values_ = sets_values;
      visit_fields(args, *this);
    }
    return args;
  }

  void field(const char* field, moire_tensor& t, Role role, const char* sizes);
  void field(const char* field, moire_weight& w, Role role, const char* sizes);
  void field(const char* field, moire_quantized& q, Role role, const char* sizes);
  void field(const char* field, const uint8_t*& beta, Role role, int64_t count);
  void field(const char* field, const moire_offsets_output*& outputs, Role role, int64_t& count);
  void field(const char* field, moire_groups& groups);
  void field(const char*, moire_workspace&) {}

  void value(std::string_view name, int32_t& value, int = 0);
  void value(std::string_view name, int64_t& value, int = 0);
  void value(const char*, float& scale, int = 0);  // of a router
  void value(const char*, moire_activation& value, int = 0) { value = problem_.activation; }
  void value(std::string_view name, moire_glu_layout& value, int = 0);

 private:
  using Shape = Operands::Shape;

  std::string name_of(std::string_view field) const;
  int64_t size(char letter) const;
  Shape shape_of(std::string_view sizes, bool is_output) const;
  DType dtype_of(std::string_view name, std::string_view sizes) const;
  const Format& ragged_format(std::string_view name) const;
  DType element_of(std::string_view name) const;  // of FP8
  DType stored() const { return problem_.op->is_layer() ? problem_.stored() : problem_.dtype; }
  bool wants(std::string_view field, std::string_view name, Role role) const;
  bool wants_copy(std::string_view name, Role role) const;
  int32_t layout() const { return problem_.in_out ? MOIRE_IN_OUT : MOIRE_OUT_IN; }
  bool is_product() const { return call_->entry.starts_with("grouped_gemm"); }
  bool is_wgrad() const { return call_->entry == "grouped_gemm_wgrad"; }
  bool is_tiles() const;  // what is decoded are weights
  bool is_way_back() const { return call_ != &problem_.op->calls[0]; }  // of convert_scales

  void fill_input(const TensorView& t, const std::string& name, const char* sizes);
  TensorView codes(const std::string& name, const Shape& shape, int32_t scaling, int32_t direction,
                   double scale, int64_t block_rows);
  TensorView convert(const std::string& name, Role role);
  int32_t weight_direction() const;
  moire_weight take_weight(const std::string& name, DType dtype, const Shape& shape);
  Shape scales_shape(int32_t scaling, int32_t direction, Shape data) const;

  Operands& operands_;
  const Problem& problem_;
  const OpCall* call_ = nullptr;
  bool sets_values_ = false;
  bool is_gathered_ = false;                   // the last operand that may be
  std::map<std::string, TensorView> tensors_;  // of all calls, by name
  std::map<std::string, moire_weight> weights_;
  std::map<std::string, moire_quantized> copies_;
};

}  // namespace moire::tool
