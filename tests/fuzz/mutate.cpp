#include "tests/fuzz/mutate.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace moire::fuzz {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kVast = int64_t{1} << 40;
constexpr int64_t kMaxBytes = 1 << 20;

// Of the pieces that `fits` accepts, one; null if there is none.
template <class Fits>
Piece* pick_piece(Random& random, std::vector<Piece>& pieces, Fits&& fits) {
  std::vector<Piece*> found;
  for (Piece& p : pieces) {
    if (fits(p)) found.push_back(&p);
  }
  if (found.empty()) return nullptr;
  return found[static_cast<size_t>(random.integer(0, static_cast<int64_t>(found.size()) - 1))];
}

bool is_tensor(const Piece& p) { return p.tensor != nullptr && p.tensor->rank != 0; }

// Gives a tensor of a new shape memory that holds it. False if there is none so large.
bool back(Call& call, const std::string& name, moire_tensor& t) {
  if (t.rank < 1 || t.rank > 3) return true;
  for (int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0) return true;
  }
  const TensorView view(t);
  if (dtype_size(view.type()) == 0) return true;
  if (t.data == nullptr) t.data = &t;  // for its size
  const int64_t bytes = span_bytes(t);
  if (bytes == kMost) return true;  // no memory is so large
  if (bytes > kMaxBytes) return false;
  if (bytes <= 0) {
    t.data = nullptr;
    return true;
  }
  t.data = call.memory.take(name + " (new)", bytes, dtype_size(view.type()));
  return true;
}

Mutation change_shape(Call& call) {
  Random& random = call.random;
  std::vector<Piece> pieces = call.pieces();
  Piece* const piece = pick_piece(random, pieces, is_tensor);
  if (piece == nullptr) return {};
  moire_tensor& t = *piece->tensor;
  const moire_tensor before = t;
  const auto axis = static_cast<int32_t>(random.integer(0, std::clamp(t.rank, 1, 3) - 1));
  int64_t& size = t.shape[axis];
  switch (random.integer(0, 3)) {
    case 0:
      t.dtype = random.pick<int32_t>({-1, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 42});
      break;
    case 1:
      t.rank = random.pick<int32_t>({-1, 0, 1, 2, 3, 4, 7});
      break;
    case 2:
      size = random.pick<int64_t>(
          {0, 1, -1, size - 1, size + 1, kVast, int64_t{1} << 62, kMost, kLeast});
      break;
    default:
      t.row_stride = random.pick<int64_t>({-1, 1, t.shape[t.rank - 1] - 1, t.shape[t.rank - 1] + 3,
                                           kVast, int64_t{1} << 62, kMost, kLeast});
  }
  if (!back(call, piece->name, t)) {
    t = before;
    return {};
  }
  return {"shape, dtype, rank or stride of " + piece->name};
}

Mutation change_pointer(Call& call) {
  std::vector<Piece> pieces = call.pieces();
  const Piece* const piece = pick_piece(call.random, pieces, [](const Piece& p) {
    return p.bytes > 0 && *p.pointer != nullptr && p.role != Role::kUnused;
  });
  if (piece == nullptr) return {};
  const bool is_counted = piece->tensor == nullptr && piece->dtype == 0;  // betas may be absent
  if (call.random.percent(50) && !(is_counted && piece->role == Role::kIn)) {
    *piece->pointer = nullptr;
    return {"null for " + piece->name};
  }
  const bool needs_alignment =
      piece->dtype != 0 && dtype_size(static_cast<DType>(piece->dtype)) > 1;
  if (!needs_alignment) return {};
  *piece->pointer = static_cast<char*>(*piece->pointer) + 1;
  return {"misaligned " + piece->name, true};
}

Mutation change_value(Call& call) {
  Random& random = call.random;
  std::vector<Value> values = call.values();
  std::erase_if(values, [](const Value& v) { return v.name == "num_outputs"; });
  if (values.empty()) return {};
  const Value& value =
      values[static_cast<size_t>(random.integer(0, static_cast<int64_t>(values.size()) - 1))];
  const auto words = static_cast<int64_t>(value.bytes / sizeof(int32_t));
  auto* const word = static_cast<int32_t*>(value.at) + random.integer(0, words - 1);
  int32_t bits = 0;
  std::memcpy(&bits, word, sizeof(bits));
  constexpr int32_t kNaN = 0x7FC00000;
  bits = random.pick<int32_t>({-1, 0, 1, 2, 3, 4, bits + 1, 100, kNaN,
                               std::numeric_limits<int32_t>::max(),
                               std::numeric_limits<int32_t>::min()});
  std::memcpy(word, &bits, sizeof(bits));
  return {"value of " + value.name};
}

Mutation change_groups(Call& call) {
  if (call.groups == nullptr) return {};
  Random& random = call.random;
  moire_groups& g = *call.groups;
  const auto entries = g.offsets == nullptr ? 0 : call.plan.num_groups + 1;
  switch (random.integer(0, 4)) {
    case 0:
      g = {};
      return {"groups {NULL, 0, 0}"};
    case 1:
      g.num_groups = random.pick<int64_t>({-1, 0, g.num_groups - 1, kLeast});
      return {"groups.num_groups"};
    case 2:
      g.capacity = random.pick<int64_t>({-1, 0, g.capacity - 1, g.capacity + 1, kVast, kMost});
      return {"groups.capacity"};
    case 3:
      g = {nullptr, 0, g.capacity};
      return {"no groups, with a capacity"};
    default: {
      if (entries == 0) return {};
      auto* const offsets = const_cast<int64_t*>(g.offsets);
      int64_t& offset = offsets[random.integer(0, entries - 1)];
      offset = random.pick<int64_t>({-1, offset - 1, offset + 1, kVast, kMost, kLeast});
      return {"an offset"};
    }
  }
}

Mutation change_index(Call& call) {
  Random& random = call.random;
  std::vector<Piece> pieces = call.pieces();
  const Piece* const piece = pick_piece(random, pieces, [](const Piece& p) {
    const bool is_index = p.dtype == MOIRE_INT32 || p.dtype == MOIRE_INT64;
    return is_index && p.role == Role::kIn && p.bytes > 0;
  });
  if (piece == nullptr) return {};
  const int64_t unit = dtype_size(static_cast<DType>(piece->dtype));
  char* const at =
      static_cast<char*>(*piece->pointer) + random.integer(0, piece->bytes / unit - 1) * unit;
  const auto value = random.pick<int64_t>({-2, -1, 0, 1, 1000, kVast, kMost, kLeast});
  std::memcpy(at, &value, static_cast<size_t>(unit));
  return {"an entry of " + piece->name};
}

// Of two pieces one is written: they may not share a byte.
Mutation overlap(Call& call) {
  std::vector<Piece> pieces = call.pieces();
  const auto is_there = [](const Piece& p) {
    return p.bytes > 0 && *p.pointer != nullptr && p.role != Role::kUnused;
  };
  const Piece* a = pick_piece(call.random, pieces, is_there);
  const Piece* b = pick_piece(call.random, pieces, [&](const Piece& p) {
    return is_there(p) && &p != a && a != nullptr && (is_written(a->role) || is_written(p.role));
  });
  if (b == nullptr) return {};
  if (a->bytes > b->bytes) std::swap(a, b);  // there is memory for both
  *a->pointer = *b->pointer;
  return {a->name + " over " + b->name, true};
}

Mutation change_workspace(Call& call, size_t needed) {
  if (call.workspace == nullptr || needed == 0) return {};
  moire_workspace& w = *call.workspace;
  switch (call.random.integer(0, 2)) {
    case 0:
      w.bytes = needed - 1;
      return {"a workspace one byte too small", true};
    case 1:
      w.data = nullptr;
      return {"no workspace", true};
    default:
      w.data = static_cast<char*>(w.data) + 16;
      w.bytes -= 16;
      return {"a workspace that is not aligned", true};
  }
}

Mutation drop(Call& call) {
  std::vector<Piece> pieces = call.pieces();
  const Piece* const piece = pick_piece(call.random, pieces, is_tensor);
  if (piece == nullptr) return {};
  *piece->tensor = {};
  return {"without " + piece->name};
}

// What the call has no use for is not looked at, listed or packed.
Mutation spoil_unused(Call& call) {
  std::vector<moire_weight*> weights = call.unused_weights();
  if (weights.empty()) return {};
  for (moire_weight* const w : weights) {
    w->tensor.shape[0] = int64_t{1} << 20;
    if (w->list == nullptr) w->tensor.data = reinterpret_cast<void*>(uintptr_t{16});
  }
  return {"weights without a use that are longer than they are"};
}

// No elements, but so many rows that a loop over them would not end.
Mutation empty_but_vast(Call& call) {
  std::vector<Piece> pieces = call.pieces();
  const int64_t capacity = call.plan.capacity, tokens = call.plan.tokens;
  for (const Piece& p : pieces) {
    if (!is_tensor(p)) continue;
    moire_tensor& t = *p.tensor;
    if (t.shape[0] != capacity && t.shape[0] != tokens) continue;
    if (t.rank == 1) {
      t = {};
      continue;
    }
    t.shape[0] = kVast;
    t.shape[t.rank - 1] = 0;
    t.data = nullptr;
  }
  if (call.groups != nullptr && call.groups->num_groups == 0) call.groups->capacity = kVast;
  return {"2^40 rows without elements"};
}

Mutation older_struct(Call& call) {
  const auto whole = static_cast<int64_t>(call.struct_size());
  if (call.random.percent(10)) {
    call.struct_size() = static_cast<size_t>(call.random.pick<int64_t>({0, 7, whole + 8, kMost}));
    return {"a struct_size that there is not", true};
  }
  const auto bytes = static_cast<size_t>(8 * call.random.integer(1, whole / 8));  // no half pointer
  auto* const args = reinterpret_cast<char*>(&call.struct_size());                // the first field
  std::memset(args + bytes, 0, static_cast<size_t>(whole) - bytes);
  call.struct_size() = bytes;
  return {"an older, shorter struct"};
}

}  // namespace

Mutation mutate(Call& call, size_t workspace_bytes) {
  switch (call.random.integer(0, 12)) {
    case 0:
    case 1:
    case 2:
      return change_shape(call);
    case 3:
      return change_pointer(call);
    case 4:
      return change_value(call);
    case 5:
      return change_groups(call);
    case 6:
      return change_index(call);
    case 7:
    case 8:
      return overlap(call);
    case 9:
      return change_workspace(call, workspace_bytes);
    case 10:
      return call.random.percent(50) ? drop(call) : empty_but_vast(call);
    case 11:
      return spoil_unused(call);
    default:
      return older_struct(call);
  }
}

}  // namespace moire::fuzz
