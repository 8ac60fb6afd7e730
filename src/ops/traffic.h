// The bytes that a call reads and writes, by the fields of its struct (moire/fields.h), for
// explain: each operand once, gathered rows as often as they are used, every row of the capacity in
// use. Not those of its workspace.
#pragma once

#include <moire/fields.h>

#include <cstdint>

namespace moire {

class Traffic : public MemoryVisitor {
 public:
  using MemoryVisitor::field;
  void field(const char* name, const moire_tensor& t, Role role, const char* sizes) {
    if (is_present(t) && sizes[0] == 'C') capacity_ = t.shape[0];
    gathers_ |= is_read(role) && is_present(t) && std::string_view(name).ends_with("row_idx");
    if (!is_read(role) || sizes[0] != 'S') return add(t, role);
    row_bytes_ += TensorView(t).columns() * dtype_size(TensorView(t).type());
    source_bytes_ += TensorView(t).num_bytes();
  }
  void field(const char*, const moire_weight& w, Role role, const char*) { add(w.tensor, role); }
  void field(const char*, const moire_quantized& q, Role role, const char* sizes) {
    if (is_present(q) && sizes[0] == 'C') capacity_ = q.data.shape[0];
    add(q.data, role);
    add(q.scales, role);
  }
  void field(const char*, const moire_offsets_output* outputs, Role role, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(outputs[i].offsets, role);
  }
  void field(const char*, const moire_groups& groups) {
    if (groups.capacity != 0) capacity_ = groups.capacity;
  }

  int64_t read() const { return read_ + (gathers_ ? capacity_ * row_bytes_ : source_bytes_); }
  int64_t written() const { return written_; }

 private:
  void add(const TensorView& t, Role role) {
    if (is_read(role)) read_ += t.num_bytes();
    if (is_written(role)) written_ += t.num_bytes();
  }

  int64_t read_ = 0, written_ = 0;
  int64_t capacity_ = 0, row_bytes_ = 0, source_bytes_ = 0;  // of what may be gathered
  bool gathers_ = false;
};

Traffic traffic_of(const auto& args) {
  Traffic traffic;
  visit_fields(args, traffic);
  return traffic;
}

}  // namespace moire
