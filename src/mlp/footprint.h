// Footprint: all memory that a composite reads and writes, listed weights matrix by matrix, so that
// an overlap is found before the first step runs.
#pragma once

#include <moire/tensor.h>

#include <cstdint>
#include <string_view>

#include "core/argument_check.h"
#include "core/short_list.h"

namespace moire {

class Footprint {
 public:
  Footprint& reads(std::string_view name, const TensorView& t) { return add(name, -1, t, false); }
  Footprint& writes(std::string_view name, const TensorView& t) { return add(name, -1, t, true); }
  Footprint& reads(std::string_view name, const Weight& w) { return add(name, w, false); }
  Footprint& writes(std::string_view name, const Weight& w) { return add(name, w, true); }
  // Both parts of a copy under its name.
  Footprint& reads(std::string_view name, const moire_quantized& q) { return add(name, q, false); }
  Footprint& writes(std::string_view name, const moire_quantized& q) { return add(name, q, true); }
  Footprint& reads(const moire_groups& groups);
  Footprint& writes(const Workspace& workspace);

  // No byte that is written is read or written under another name.
  bool check(ArgumentCheck& check);

 private:
  struct Span {
    uintptr_t begin, end;
    std::string_view name;
    int64_t index;  // of a list; -1: not listed
    bool is_written;
  };

  Footprint& add(std::string_view name, int64_t index, const TensorView& t, bool is_written);
  Footprint& add(std::string_view name, const Weight& w, bool is_written);
  Footprint& add(std::string_view name, const moire_quantized& q, bool is_written);

  ShortList<Span, 64> spans_;
};

}  // namespace moire
