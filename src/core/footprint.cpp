#include "core/footprint.h"

#include <algorithm>
#include <limits>

#include "core/format.h"

namespace moire {

void Outputs::add(const char* name) {
  const size_t last = names_->rfind(" or ");
  if (last != std::string::npos) names_->replace(last, 4, ", ");
  *names_ += concat(names_->empty() ? "" : " or ", name);
}

void Footprint::field(const char* name, const moire_weight& w, Role role, const char*) {
  if (role == Role::kUnused || !is_present(w)) return;
  if (w.list != nullptr) {
    add(name, -1, ".list", w.list, w.tensor.shape[0] * int64_t{sizeof(void*)}, Role::kIn);
  }
  for_each_matrix(
      w, [&](int64_t g, void* data, int64_t bytes) { add(name, g, "", data, bytes, role); });
}

void Footprint::field(const char* name, const moire_quantized& q, Role role, const char*) {
  if (!is_present(q)) return;
  add(name, -1, ".data", q.data.data, span_bytes(q.data), role);
  add(name, -1, ".scales", q.scales.data, span_bytes(q.scales), role);
}

void Footprint::field(const char* name, const moire_offsets_output* outputs, Role role,
                      int64_t count) {
  add(name, -1, "", outputs, count * int64_t{sizeof(*outputs)}, Role::kIn);
  for (int64_t i = 0; i < count; ++i) {
    const moire_tensor& t = outputs[i].offsets;
    add(name, i, ".offsets", t.data, span_bytes(t), role);
  }
}

void Footprint::field(const char* name, const moire_groups& groups) {
  if (groups.num_groups <= 0) return;
  add(name, -1, ".offsets", groups.offsets,
      (groups.num_groups + 1) * int64_t{sizeof(*groups.offsets)}, Role::kIn);
}

void Footprint::field(const char*, const moire_workspace& workspace) {
  const auto most = static_cast<size_t>(std::numeric_limits<int64_t>::max());
  add("the workspace", -1, "", workspace.data,
      static_cast<int64_t>(std::min(workspace.bytes, most)), Role::kScratch);
}

void Footprint::add(const char* name, int64_t index, const char* part, const void* data,
                    int64_t bytes, Role role) {
  if (role == Role::kUnused || data == nullptr || bytes <= 0) return;
  if (is_written(role) == is_settled_) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t room = std::numeric_limits<uintptr_t>::max() - begin;
  const uintptr_t end = begin + std::min(room, static_cast<uintptr_t>(bytes));
  const auto order = role == Role::kScratch ? -1 : static_cast<int32_t>(written_.size());
  const Piece piece{begin, end, name, part, static_cast<int32_t>(index), order};
  if (!is_settled_) {
    written_.push_back(piece);
    return;
  }
  // Of the pieces that are written, which lie apart, the first that ends behind this one's begin.
  const auto near =
      std::upper_bound(written_.begin(), written_.end(), piece.begin,
                       [](uintptr_t address, const Piece& other) { return address < other.end; });
  if (near != written_.end() && near->begin < piece.end) refuse(*near, piece);
}

bool Footprint::settle() {
  std::sort(written_.begin(), written_.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  is_settled_ = true;
  for (size_t i = 1; check_.ok() && i < written_.size(); ++i) {
    const Piece &a = written_[i - 1], &b = written_[i];
    if (a.end <= b.begin) continue;
    a.order > b.order ? refuse(a, b) : refuse(b, a);
  }
  return check_.ok();
}

void Footprint::refuse(const Piece& output, const Piece& other) {
  check_.require(false, text(output), " and ", text(other),
                 " overlap in their address ranges, must be apart");
}

std::string Footprint::text(const Piece& piece) {
  return concat(piece.name, piece.index < 0 ? "" : concat("[", piece.index, "]"), piece.part);
}

}  // namespace moire
