// What the fields of a call's struct say of it (moire/fields.h): a value that is none of an
// enumeration is refused, β of a group as well, so is a call without an output, and no byte that is
// written may be read or written under another name.
#pragma once

#include <moire/fields.h>

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <vector>

#include "core/argument_check.h"

namespace moire {

class Values {
 public:
  explicit Values(ArgumentCheck& check) : check_(check) {}
  void field(const char*, const auto&, auto...) {}
  void field(const char* name, const uint8_t* betas, Role, int64_t num_groups) {
    check_.betas(name, betas, num_groups);
  }
  void value(const char* name, int32_t value, int count = 0) {
    if (count > 0) check_.enumerator(name, value, count);
  }
  void value(const char*, const auto&, int = 0) {}

 private:
  ArgumentCheck& check_;
};

// Whether there is an output, and what the outputs are called.
class Outputs : public MemoryVisitor {
 public:
  using MemoryVisitor::field;
  // `names`, where not null, becomes "d, z or act".
  explicit Outputs(std::string* names = nullptr) : names_(names) {}
  void field(const char* name, const auto& operand, Role role, const char*) {
    if (!is_written(role)) return;
    are_present_ = are_present_ || is_present(operand);
    if (names_ != nullptr) add(name);
  }
  // A list may be empty: splits are judged all the same.
  void field(const char*, const moire_offsets_output*, Role, int64_t) { are_present_ = true; }

  bool are_present() const { return are_present_; }

 private:
  void add(const char* name);
  bool are_present_ = false;
  std::string* names_;
};

// Footprint: the memory of a call, listed weights matrix by matrix.
class Footprint : public MemoryVisitor {
 public:
  explicit Footprint(ArgumentCheck& check) : check_(check) { written_.reserve(kInline); }

  // What visit_fields() finds. The first time what is written is kept; once settle() has found it
  // apart, what is read is compared with it, so that lists of weights, however long, need no room.
  void field(const char* name, const moire_tensor& t, Role role, const char*) {
    add(name, -1, "", t.data, span_bytes(t), role);
  }
  void field(const char* name, const moire_weight& w, Role role, const char*);
  void field(const char* name, const moire_quantized& q, Role role, const char*);
  void field(const char* name, const uint8_t* bytes, Role role, int64_t count) {
    add(name, -1, "", bytes, count, role);
  }
  void field(const char* name, const moire_offsets_output* outputs, Role role, int64_t count);
  void field(const char* name, const moire_groups& groups);
  void field(const char* name, const moire_workspace& workspace);

  bool settle();

 private:
  // One stretch of memory. Messages call it "name", "name[index]", "name.part", ...
  struct Piece {
    uintptr_t begin, end;
    const char *name, *part;
    int32_t index;  // -1: not one of several
    int32_t order;  // in the struct; -1: the workspace, which is named after outputs
  };

  void add(const char* name, int64_t index, const char* part, const void* data, int64_t bytes,
           Role role);
  void refuse(const Piece& output, const Piece& other);
  static std::string text(const Piece& piece);

  // Two lists of 256 experts' gradients fit without the heap.
  static constexpr size_t kInline = 2 * 256 + 32;

  ArgumentCheck& check_;
  bool is_settled_ = false;
  alignas(Piece) std::byte memory_[kInline * sizeof(Piece)];
  std::pmr::monotonic_buffer_resource resource_{memory_, sizeof(memory_)};
  std::pmr::vector<Piece> written_{&resource_};  // by address, once settled
};

// At least one of the operands that the call would write is there.
bool check_outputs(ArgumentCheck& check, const auto& args) {
  Outputs outputs;
  visit_fields(args, outputs);
  if (outputs.are_present() || !check.ok()) return check.ok();
  std::string names;
  visit_fields(args, Outputs(&names));
  return check.require(false, "there is nothing to do: ", names, " must be present");
}

// Overlap is judged by address ranges, before anything runs; the arguments have passed their other
// checks. Names what is written first, of two outputs the one that comes later in the struct.
void check_memory(ArgumentCheck& check, const auto& args) {
  if (!check.ok()) return;
  Footprint memory(check);
  visit_fields(args, memory);
  if (memory.settle()) visit_fields(args, memory);
}

// All that is checked before it is known how the call runs; validate() finds groups and values that
// are sound.
template <class A>
ArgumentCheck check_call(std::string_view name, const Context& context,
                         ArgumentCheck::Purpose purpose, void (*validate)(ArgumentCheck&, const A&),
                         const A& args) {
  ArgumentCheck check(name, context, purpose);
  if constexpr (requires { args.groups; }) check.groups(args.groups);
  visit_fields(args, Values(check));
  if (check.ok()) validate(check, args);
  check_outputs(check, args);
  if (purpose == ArgumentCheck::Purpose::kRun) check_memory(check, args);
  return check;
}

}  // namespace moire
