// C entries of the ops: each is the C++ function behind the boundary.
#include <moire/expert_parallel.h>
#include <moire/fields.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/groups.h>
#include <moire/ops.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <string_view>

#include "capi/boundary.h"

// One C entry, and one with its workspace twin.
#define MOIRE_ENTRY(name)                                                               \
  int32_t moire_##name(const moire_context* context, const moire_##name##_args* args) { \
    return moire::capi::call("moire_" #name, context, args, moire::name);               \
  }
#define MOIRE_ENTRY_WITH_WORKSPACE(name)                                                          \
  MOIRE_ENTRY(name)                                                                               \
  int32_t moire_##name##_workspace(const moire_context* context, const moire_##name##_args* args, \
                                   size_t* bytes) {                                               \
    return moire::capi::call_workspace("moire_" #name "_workspace", context, args, bytes,         \
                                       moire::name##_workspace);                                  \
  }

namespace moire::capi {
namespace {

struct RoleOf : MemoryVisitor {
  void field(const char* name, const auto&, Role role, auto) {
    note(name, is_written(role) ? MOIRE_ROLE_OUT : MOIRE_ROLE_IN);
  }
  void field(const char* name, const moire_groups&) { note(name, MOIRE_ROLE_IN); }
  void field(const char* name, const moire_workspace&) { note(name, MOIRE_ROLE_SCRATCH); }
  void note(std::string_view name, moire_role role) {
    if (name == wanted) found = role;
  }

  std::string_view wanted;
  int32_t found = MOIRE_ROLE_NONE;
};

// In a call whose other fields are zero: nothing is saved, nothing accumulates.
template <class C>
int32_t role_of(std::string_view field) {
  RoleOf visitor{{}, field};
  const C args{};
  visit_fields(args, visitor);
  return visitor.found;
}

}  // namespace
}  // namespace moire::capi

extern "C" {

MOIRE_FOR_EACH_OP(MOIRE_ENTRY, MOIRE_ENTRY_WITH_WORKSPACE)

int32_t moire_scales_shape(int32_t scaling, int32_t direction, int32_t layout, int64_t rows,
                           int64_t k, int64_t num_groups, int64_t* shape) {
  return moire::capi::guarded(
      [&] { return moire::scales_shape(scaling, direction, layout, rows, k, num_groups, shape); });
}

int32_t moire_prepare_weight_form(const moire_context* context,
                                  const moire_prepare_weight_args* args,
                                  moire_prepared_weight* form) {
  return moire::capi::call(
      "moire_prepare_weight_form", context, args,
      [&](const auto& c, const auto& a) { return moire::prepare_weight_form(c, a, form); });
}

int32_t moire_field_role(const char* op, const char* field) {
  if (op == nullptr || field == nullptr) return MOIRE_ROLE_NONE;
#define MOIRE_ROLE_IF(name) \
  if (std::string_view(op) == #name) return moire::capi::role_of<moire_##name##_args>(field);
  MOIRE_FOR_EACH_OP(MOIRE_ROLE_IF, MOIRE_ROLE_IF)
  return MOIRE_ROLE_NONE;
}

}  // extern "C"
