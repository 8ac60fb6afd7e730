#include "tests/fuzz/call.h"

#include <sstream>
#include <type_traits>
#include <utility>

#include "tests/fuzz/prepared.h"

namespace moire::fuzz {
namespace {

class ListPieces : public MemoryVisitor {
 public:
  void field(const char* name, moire_tensor& t, Role role, const char*) {
    pieces.push_back({name, &t.data, &t, span_bytes(t), role, t.dtype});
  }
  void field(const char* name, moire_weight& w, Role role, const char* sizes) {
    if (role == Role::kUnused && is_present(w)) unused_weights.push_back(&w);
    if (w.list == nullptr) return field(name, w.tensor, role, sizes);
    if (role == Role::kUnused) return;  // it may be of any length
    const moire_tensor& t = w.tensor;
    const int64_t unit = dtype_size(TensorView(t).type());
    for (int64_t g = 0; g < t.shape[0]; ++g) {
      pieces.push_back({std::string(name) + "[" + std::to_string(g) + "]",
                        const_cast<void**>(&w.list[g]), nullptr, t.shape[1] * t.shape[2] * unit,
                        role, t.dtype});
    }
  }
  void field(const char* name, moire_quantized& q, Role role, const char* sizes) {
    if (!is_present(q)) return;
    field(name, q.data, role, sizes);
    field(name, q.scales, role, sizes);
  }
  void field(const char* name, const uint8_t*& bytes, Role role, int64_t count) {
    pieces.push_back({name, address(bytes), nullptr, bytes == nullptr ? 0 : count, role, 0});
  }
  void field(const char*, const moire_offsets_output*& outputs, Role role, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      auto& t = const_cast<moire_tensor&>(outputs[i].offsets);
      const std::string name = "outputs[" + std::to_string(i) + "].offsets";
      field(name.c_str(), t, role, "");
    }
  }
  void field(const char* name, moire_groups& g) {
    const int64_t bytes = g.num_groups <= 0 ? 0 : (g.num_groups + 1) * int64_t{sizeof(int64_t)};
    pieces.push_back(
        {name, address(g.offsets), nullptr, g.offsets == nullptr ? 0 : bytes, Role::kIn, 0});
    groups = &g;
  }
  void field(const char* name, moire_workspace& w) {
    pieces.push_back({name, &w.data, nullptr, static_cast<int64_t>(w.bytes), Role::kScratch, 0});
    workspace = &w;
  }
  std::vector<Piece> pieces;
  std::vector<moire_weight*> unused_weights;
  moire_groups* groups = nullptr;
  moire_workspace* workspace = nullptr;

 private:
  template <class T>
  static void** address(const T*& pointer) {
    return reinterpret_cast<void**>(const_cast<T**>(&pointer));
  }
};

class ListValues {
 public:
  void field(const char*, auto&, auto...) {}
  void value(const char* name, auto& value, int = 0) {
    constexpr bool kIsInteger = std::is_integral_v<std::remove_reference_t<decltype(value)>>;
    values.push_back({name, &value, sizeof(value), kIsInteger});
  }
  std::vector<Value> values;
};

class Print {
 public:
  void field(const char* name, const moire_tensor& t, Role, const char*) {
    if (!is_present(t)) return;
    out << "  " << name << ": dtype " << t.dtype << " rank " << t.rank << " [" << t.shape[0] << ", "
        << t.shape[1] << ", " << t.shape[2] << "] stride " << t.row_stride << " at " << t.data
        << "\n";
  }
  void field(const char* name, const moire_weight& w, Role role, const char* sizes) {
    field(name, w.tensor, role, sizes);
    if (is_present(w)) out << "    layout " << w.layout << " list " << w.list << "\n";
  }
  void field(const char* name, const moire_quantized& q, Role role, const char* sizes) {
    field(name, q.data, role, sizes);
    field(name, q.scales, role, sizes);
  }
  void field(const char* name, const void* pointer, Role, int64_t count) {
    if (pointer != nullptr) out << "  " << name << ": " << count << " at " << pointer << "\n";
  }
  void field(const char* name, const moire_groups& g) {
    out << "  " << name << ": " << g.num_groups << " groups, capacity " << g.capacity << " at "
        << g.offsets << "\n";
  }
  void field(const char* name, const moire_workspace& w) {
    out << "  " << name << ": " << w.bytes << " bytes at " << w.data << "\n";
  }
  void value(const char* name, const auto& value, int = 0) {
    using T = std::remove_cvref_t<decltype(value)>;
    out << "  " << name << ": ";
    if constexpr (std::is_arithmetic_v<T>) {
      out << value << "\n";
    } else if constexpr (std::is_same_v<T, moire_activation>) {
      out << "kind " << value.kind << "\n";
    } else {
      out << "block " << value.block << " order " << value.order << "\n";
    }
  }
  std::ostringstream out;
};

template <class A>
using Entry = int32_t (*)(const moire_context*, const A*);
template <class A>
using SizeEntry = int32_t (*)(const moire_context*, const A*, size_t*);

// Of an op without a workspace.
template <class A>
int32_t no_size(const moire_context*, const A*, size_t*) {
  return MOIRE_OK;
}

template <class A, Entry<A> entry, SizeEntry<A> size_entry>
class DrawnCall : public Call {
 public:
  explicit DrawnCall(uint64_t seed) : Call(seed) {
    args_.struct_size = sizeof(A);
    Draw(random, plan, memory).fill(args_);
    draw_prepared(args_, random, memory);
    ListPieces found;
    visit_fields(args_, found);
    groups = found.groups;
    workspace = found.workspace;
  }
  int32_t run(const moire_context* context) override { return entry(context, &args_); }
  bool has_workspace() const override {
    return requires { args_.workspace; };
  }
  int32_t size(const moire_context* context, size_t* bytes) override {
    return size_entry(context, &args_, bytes);
  }
  std::vector<Piece> pieces() override {
    ListPieces found;
    visit_fields(args_, found);
    return std::move(found.pieces);
  }
  std::vector<moire_weight*> unused_weights() override {
    ListPieces found;
    visit_fields(args_, found);
    return std::move(found.unused_weights);
  }
  std::vector<Value> values() override {
    ListValues found;
    visit_fields(args_, found);
    return std::move(found.values);
  }
  std::string text() const override {
    Print print;
    print.out << "  struct_size: " << args_.struct_size << "\n";
    visit_fields(args_, print);
    return print.out.str();
  }
  size_t& struct_size() override { return args_.struct_size; }

 private:
  A args_ = {};
};

template <class A, Entry<A> entry, SizeEntry<A> size_entry>
std::unique_ptr<Call> draw(uint64_t seed) {
  return std::make_unique<DrawnCall<A, entry, size_entry>>(seed);
}

}  // namespace

std::vector<Op> every_op() {
  std::vector<Op> ops;
#define OP(name) \
  ops.push_back({#name, draw<moire_##name##_args, moire_##name, no_size<moire_##name##_args>>});
#define OP_WITH_WORKSPACE(name) \
  ops.push_back({#name, draw<moire_##name##_args, moire_##name, moire_##name##_workspace>});
#include "tests/capi/abi.inc"
  return ops;
}

}  // namespace moire::fuzz
