#include "mlp/footprint.h"

#include <algorithm>
#include <string>

#include "core/format.h"

namespace moire {

Footprint& Footprint::add(std::string_view name, int64_t index, const TensorView& t,
                          bool is_written) {
  if (!t.is_present() || t.data == nullptr || t.num_elements() == 0) return *this;
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  const int64_t elements = (t.num_rows() - 1) * t.stride() + t.columns();
  const auto bytes = static_cast<uintptr_t>(elements * dtype_size(t.type()));
  spans_->push_back({begin, begin + bytes, name, index, is_written});
  return *this;
}

Footprint& Footprint::add(std::string_view name, const Weight& w, bool is_written) {
  if (w.list == nullptr) return add(name, -1, w.tensor, is_written);
  for (int64_t g = 0; g < w.tensor.shape[0]; ++g) add(name, g, w.matrix(g), is_written);
  return *this;
}

Footprint& Footprint::add(std::string_view name, const moire_quantized& q, bool is_written) {
  return add(name, -1, q.data, is_written).add(name, -1, q.scales, is_written);
}

Footprint& Footprint::reads(const moire_groups& groups) {
  if (groups.num_groups <= 0) return *this;
  auto* const offsets = const_cast<int64_t*>(groups.offsets);
  return reads("groups.offsets", TensorView(offsets, DType::kInt64, {groups.num_groups + 1}));
}

Footprint& Footprint::writes(const Workspace& workspace) {
  const auto bytes = static_cast<int64_t>(workspace.bytes);
  return writes("the workspace", TensorView(workspace.data, DType::kUint8, {bytes}));
}

bool Footprint::check(ArgumentCheck& check) {
  std::sort(spans_->begin(), spans_->end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const auto text = [](const Span& s) {
    return s.index < 0 ? std::string(s.name) : concat(s.name, "[", s.index, "]");
  };
  // Of the spans that begin earlier, those that reach furthest.
  const Span* furthest = nullptr;
  const Span* furthest_written = nullptr;
  for (const Span& span : *spans_) {
    const Span* const earlier = span.is_written ? furthest : furthest_written;
    if (earlier != nullptr && earlier->end > span.begin) {
      const Span& output = span.is_written ? span : *earlier;
      const Span& other = span.is_written ? *earlier : span;
      return check.require(false, text(output), " and ", text(other),
                           " overlap in their address ranges, must be apart");
    }
    if (furthest == nullptr || span.end > furthest->end) furthest = &span;
    if (span.is_written && (furthest_written == nullptr || span.end > furthest_written->end)) {
      furthest_written = &span;
    }
  }
  return check.ok();
}

}  // namespace moire
