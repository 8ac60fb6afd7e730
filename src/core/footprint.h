// The outputs and the memory of a call, by the fields of its struct (moire/fields.h). A call
// without an output is refused; and no byte that is written may be read or written under another
// name.
#pragma once

#include <moire/fields.h>

#include <cstdint>
#include <string>

#include "core/argument_check.h"
#include "core/short_list.h"

namespace moire {

// At least one of the operands that the call would write is there.
template <class A>
bool check_outputs(ArgumentCheck& check, const A& args);

// Overlap is judged by address ranges, before anything runs; the arguments have passed their other
// checks. Names what is written first, of two outputs the one that comes later in the struct.
template <class A>
bool check_memory(ArgumentCheck& check, const A& args);

class Outputs : public MemoryVisitor {
 public:
  // `names`, where not null, becomes "d, z or act".
  explicit Outputs(std::string* names = nullptr) : names_(names) {}
  void field(const char* name, const auto& operand, Role role, const char*) {
    if (!is_written(role)) return;
    are_present_ = are_present_ || is_present(operand);
    if (names_ != nullptr) add(name);
  }
  // A list may be empty: splits are judged all the same.
  void field(const char*, const moire_offsets_output*, Role, int64_t) { are_present_ = true; }
  void field(const char*, const uint8_t*, Role, int64_t) {}
  void field(const char*, const moire_groups&) {}
  void field(const char*, const moire_workspace&) {}

  bool are_present() const { return are_present_; }

 private:
  void add(const char* name);
  bool are_present_ = false;
  std::string* names_;
};

// Footprint: the memory of a call, listed weights matrix by matrix.
class Footprint : public MemoryVisitor {
 public:
  explicit Footprint(ArgumentCheck& check) : check_(check) {}

  // What visit_fields() finds. The first time what is written is kept; once settle() has found it
  // apart, what is read is compared with it, so that lists of weights, however long, need no room.
  void field(const char* name, const moire_tensor& t, Role role, const char*);
  void field(const char* name, const moire_weight& w, Role role, const char*);
  void field(const char* name, const moire_quantized& q, Role role, const char*);
  void field(const char* name, const uint8_t* bytes, Role role, int64_t count);
  void field(const char* name, const moire_offsets_output* outputs, Role role, int64_t count);
  void field(const char* name, const moire_groups& groups);
  void field(const char* name, const moire_workspace& workspace);

  bool settle();

 private:
  // One stretch of memory. Messages call it "name", "name[index]", "name.part", ...
  struct Piece {
    uintptr_t begin, end;
    const char* name;
    int32_t index;  // -1: not one of several
    int8_t order;   // of the field in its struct
    enum Part : int8_t { kWhole, kData, kScales, kOffsets, kList } part;
  };

  void add(const char* name, int64_t index, Piece::Part part, const void* data, int64_t bytes,
           Role role);
  void refuse(const Piece& output, const Piece& other);
  static std::string text(const Piece& piece);

  // Two lists of 256 experts' gradients fit without the heap.
  static constexpr size_t kInline = 2 * 256 + 32;

  ArgumentCheck& check_;
  int8_t order_ = 0;
  bool is_settled_ = false;
  ShortList<Piece, kInline> written_;  // by address, once settled
};

template <class A>
bool check_outputs(ArgumentCheck& check, const A& args) {
  Outputs outputs;
  visit_fields(args, outputs);
  if (outputs.are_present() || !check.ok()) return check.ok();
  std::string names;
  visit_fields(args, Outputs(&names));
  return check.require(false, "there is nothing to do: ", names, " must be present");
}

template <class A>
bool check_memory(ArgumentCheck& check, const A& args) {
  if (!check.ok()) return false;
  Footprint memory(check);
  visit_fields(args, memory);
  if (memory.settle()) visit_fields(args, memory);
  return check.ok();
}

}  // namespace moire
