#include "sample.h"

#include <algorithm>
#include <string_view>

namespace moire::tool {
namespace {

void narrow(moire_tensor& t, int64_t columns) {
  if (!is_present(t)) return;
  t.row_stride = TensorView(t).stride();
  t.shape[t.rank - 1] = std::min(columns, TensorView(t).columns());
}

}  // namespace

void RowCut::field(const char* name, moire_tensor& t, Role role, const char* sizes) {
  if (std::string_view(name).ends_with("row_idx")) gather(is_present(t));
  if (!is_present(t)) return;
  const TensorView whole = t;
  if (sizes[0] == 'C') {
    t = whole.slice(first_, count_);
  } else if (sizes[0] == 'S') {
    operand_ = &t;
    whole_ = whole;
    if (!is_gathered_) t = whole.slice(first_, count_);
  } else if (sizes[0] == 'G') {
    t = is_written(role) ? TensorView() : whole.slice(group_, 1);
  } else if (sizes[0] == '?') {  // columnwise scales of the group's rows
    const int64_t block = t.dtype == MOIRE_E8M0 ? 32 : 128;
    t = whole.slice(first_ / block + group_, count_ / block + 1);
  }
}

void RowCut::field(const char*, moire_weight& w, Role role, const char*) {
  if (!is_present(w)) return;
  if (is_written(role)) {
    w = Weight();
  } else if (w.list != nullptr) {
    w.list += group_;
    w.tensor.shape[0] = 1;
  } else {
    w.tensor = TensorView(w.tensor).slice(group_, 1);
  }
}

// Indices come behind the operand that they gather; how its scales and a gradient lie, that come
// later, they say as well.
void RowCut::gather(bool is_gathered) {
  is_gathered_ = is_gathered;
  if (operand_ != nullptr) *operand_ = is_gathered ? whole_ : whole_.slice(first_, count_);
  operand_ = nullptr;
}

GroupedGemmWgradArgs one_row(Operands& operands, const GroupedGemmWgradArgs& args, int64_t,
                             int64_t group) {
  constexpr int64_t kRows = 2, kColumns = 64;
  const int64_t* offsets = args.groups.offsets;
  GroupedGemmWgradArgs a =
      cut_rows(operands, args, group, offsets[group], offsets[group + 1] - offsets[group]);
  for (moire_tensor* t : {&a.a, &a.a_scales}) narrow(*t, kRows);
  for (moire_tensor* t : {&a.b, &a.b_scales}) narrow(*t, kColumns);
  TensorView d = Weight(args.d).matrix(group);
  narrow(d, kColumns);
  const TensorView corner(d.data, d.type(), {1, std::min(kRows, d.shape[0]), d.shape[1]},
                          d.stride());
  a.d = Weight(corner, args.d.layout);
  return a;
}

}  // namespace moire::tool
