// moire/fields.h names every field of every argument struct.
#include <gtest/gtest.h>
#include <moire/fields.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/every_op.h"

namespace moire {
namespace {

using Fields = std::vector<std::pair<std::string, int64_t>>;  // names and offsets

// The fields of each struct as the ABI promises them.
std::map<std::string, Fields> promised() {
  std::map<std::string, Fields> out;
#define FIELD(name, field, offset) out[#name].emplace_back(#field, offset);
#include "tests/capi/abi.inc"
  return out;
}

class Recorder {
 public:
  explicit Recorder(const void* args) : args_(static_cast<const char*>(args)) {}
  void field(const char* name, const auto& field, auto...) { add(name, &field); }
  void value(const char* name, const auto& field, int = 0) { add(name, &field); }
  Fields fields = {{"struct_size", 0}};

 private:
  void add(const char* name, const void* field) {
    fields.emplace_back(name, static_cast<const char*>(field) - args_);
  }
  const char* args_;
};

TEST(Fields, AreThoseOfEveryStruct) {
  const std::map<std::string, Fields> structs = promised();
  test::for_every_op([&](const char* name, auto args) {
    Recorder recorder(&args);
    visit_fields(args, recorder);
    std::ranges::sort(recorder.fields, {}, &Fields::value_type::second);
    EXPECT_EQ(recorder.fields, structs.at("moire_" + std::string(name) + "_args")) << name;
  });
}

// What is visited as memory is what holds a pointer.
class HoldsPointers : public MemoryVisitor {
 public:
  void field(const char*, const auto&, auto...) {}
  void value(const char* name, const auto& value, int = 0) {
    using T = std::remove_cvref_t<decltype(value)>;
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, moire_activation> ||
                  std::is_same_v<T, moire_glu_layout>);
    EXPECT_NE(name, nullptr);
  }
};

TEST(Fields, WithPointersAreVisitedAsMemory) {
  test::for_every_op([](const char*, auto args) { visit_fields(args, HoldsPointers()); });
}

// moire_field_role() of every field, and of what is none.
class HasRole {
 public:
  explicit HasRole(const char* op) : op_(op) {}
  void field(const char* name, const auto&, Role role, auto) {
    expect(name, is_written(role) ? MOIRE_ROLE_OUT : MOIRE_ROLE_IN);
  }
  void field(const char* name, const moire_groups&) { expect(name, MOIRE_ROLE_IN); }
  void field(const char* name, const moire_workspace&) { expect(name, MOIRE_ROLE_SCRATCH); }
  void value(const char* name, const auto&, int = 0) { expect(name, MOIRE_ROLE_NONE); }

 private:
  void expect(const char* name, moire_role role) {
    EXPECT_EQ(moire_field_role(op_, name), role) << op_ << "." << name;
  }
  const char* op_;
};

TEST(Fields, HaveTheirRoleInC) {
  test::for_every_op([](const char* op, auto args) { visit_fields(args, HasRole(op)); });
  EXPECT_EQ(moire_field_role("grouped_mlp_backward", "act"), MOIRE_ROLE_OUT);
  EXPECT_EQ(moire_field_role("grouped_gemm_wgrad", "d"), MOIRE_ROLE_OUT);
  EXPECT_EQ(moire_field_role("grouped_linear_backward", "x"), MOIRE_ROLE_IN);
  for (const char* op : {"glu", "moire_glu", "", static_cast<const char*>(nullptr)}) {
    EXPECT_EQ(moire_field_role(op, "nothing"), MOIRE_ROLE_NONE);
    EXPECT_EQ(moire_field_role(op, nullptr), MOIRE_ROLE_NONE);
  }
  EXPECT_EQ(moire_field_role("moire_glu", "z"), MOIRE_ROLE_NONE);
}

}  // namespace
}  // namespace moire
