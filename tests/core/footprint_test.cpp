// Which values are refused and which memory may overlap: of every struct, each field and each pair.
#include "core/footprint.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "tests/support/allocations.h"
#include "tests/support/every_op.h"

namespace moire {
namespace {

// Pointers to every piece of memory that a struct names, which FillFields sets.
struct Piece {
  std::string name;
  void** data;
  Role role;
};

// Gives every field memory of its own, 4 KiB from the next and never touched.
class FillFields : public MemoryVisitor {
 public:
  void field(const char* name, moire_tensor& t, Role role, const char*) {
    t = TensorView(next(), DType::kFP32, {2, 3, 4});
    pieces.push_back({name, &t.data, role});
  }
  void field(const char* name, moire_weight& w, Role role, const char* sizes) {
    if (!lists) return field(name, w.tensor, role, sizes);
    auto& list = lists_.emplace_back(std::vector<const void*>{next(), next()});
    w = Weight(TensorView(nullptr, DType::kFP32, {2, 3, 4}), list.data());
    for (size_t g = 0; g < 2; ++g) {
      pieces.push_back(
          {std::string(name) + "[" + std::to_string(g) + "]", const_cast<void**>(&list[g]), role});
    }
  }
  void field(const char* name, moire_quantized& q, Role role, const char* sizes) {
    field((names_.emplace_back(name) + ".data").c_str(), q.data, role, sizes);
    field((names_.emplace_back(name) + ".scales").c_str(), q.scales, role, sizes);
  }
  void field(const char* name, const uint8_t*& bytes, Role role, int64_t) {
    bytes = static_cast<const uint8_t*>(next());
    pieces.push_back({name, address(bytes), role});
  }
  void field(const char* name, const moire_offsets_output*& outputs, Role role, int64_t& count) {
    count = 2;
    outputs = outputs_;
    for (int64_t i = 0; i < count; ++i) {
      const std::string which = std::string(name) + "[" + std::to_string(i) + "].offsets";
      field(which.c_str(), outputs_[i].offsets, role, "*");
    }
  }
  void field(const char*, moire_groups& g) {
    g = Groups(static_cast<const int64_t*>(next()), 2, 6);
    pieces.push_back({"groups.offsets", address(g.offsets), Role::kIn});
  }
  void field(const char*, moire_workspace& w) {
    w = {next(), 512};
    pieces.push_back({"the workspace", &w.data, Role::kScratch});
  }

  bool lists = false;
  std::vector<Piece> pieces;

 private:
  template <class T>
  static void** address(const T*& pointer) {
    return reinterpret_cast<void**>(const_cast<T**>(&pointer));
  }
  void* next() { return reinterpret_cast<void*>(next_ += 4096); }

  uintptr_t next_ = uintptr_t{1} << 40;
  std::deque<std::vector<const void*>> lists_;
  std::deque<std::string> names_;
  moire_offsets_output outputs_[2] = {};
};

// The roles of the fields as they are filled; conditions of roles look at other fields.
template <class A>
FillFields filled(A& args, bool lists) {
  FillFields first;
  first.lists = lists;
  visit_fields(args, first);
  return first;
}

template <class A>
std::string refusal(const A& args) {
  static const Context context = Context::create().value();
  ArgumentCheck check("op", context, ArgumentCheck::Purpose::kRun);
  check_memory(check, args);
  return check.status().message();
}

template <class A>
void try_every_pair(bool lists) {
  A args;
  filled(args, lists);
  FillFields fields;  // again, because roles follow from which fields are there
  fields.lists = lists;
  visit_fields(args, fields);
  EXPECT_EQ(refusal(args), "");
  for (const Piece& a : fields.pieces) {
    for (const Piece& b : fields.pieces) {
      if (&a == &b || a.role == Role::kUnused || b.role == Role::kUnused) continue;
      void* const own = *a.data;
      *a.data = static_cast<char*>(*b.data) + 1;
      const std::string found = refusal(args);
      *a.data = own;
      if (!is_written(a.role) && !is_written(b.role)) {
        EXPECT_EQ(found, "") << "inputs may share memory";
        continue;
      }
      const std::string rest = " overlap in their address ranges, must be apart";
      const std::string one = "op: " + a.name + " and " + b.name + rest;
      const std::string other = "op: " + b.name + " and " + a.name + rest;
      EXPECT_TRUE(found == one || found == other) << a.name << " over " << b.name << ": " << found;
    }
  }
}

// Sets the value of that number, of those that are one of an enumeration, to one past its last.
class SetPastTheLast {
 public:
  explicit SetPastTheLast(int number) : number_(number) {}
  void field(const char*, const auto&, auto...) {}
  void value(const char* name, int32_t& value, int count = 0) {
    if (count <= 0 || number_-- != 0) return;
    value = count;
    sentence = "op: " + std::string(name) + " is " + std::to_string(count) + ", must be 0 to " +
               std::to_string(count - 1);
  }
  void value(const char*, const auto&, int = 0) {}
  std::string sentence;

 private:
  int number_;
};

TEST(Values, OfEveryOpAreRefusedPastTheLastOfTheirEnumeration) {
  test::for_every_op([]<class A>(const char* name, A) {
    SCOPED_TRACE(name);
    for (int i = 0;; ++i) {
      A args;
      SetPastTheLast set(i);
      visit_fields(args, set);
      if (set.sentence.empty()) break;
      ArgumentCheck check("op");
      visit_fields(args, Values(check));
      EXPECT_EQ(check.status().message(), set.sentence);
    }
  });
}

TEST(Footprint, OfEveryOpRefusesEveryPairOfWhichOneIsWritten) {
  test::for_every_op([]<class A>(const char* name, A) {
    SCOPED_TRACE(name);
    try_every_pair<A>(false);
    try_every_pair<A>(true);
  });
}

TEST(Footprint, NamesTheOutputFirstAndOfTwoOutputsTheLater) {
  float memory[64];
  moire_glu_backward_args args{};
  args.z = TensorView(memory, DType::kFP32, {2, 4});
  args.grad_z = TensorView(memory + 8, DType::kFP32, {2, 4});
  args.act = TensorView(memory + 16, DType::kFP32, {2, 2});
  EXPECT_EQ(refusal(args), "") << "neighbours do not overlap";
  args.z.data = memory + 15;
  EXPECT_EQ(refusal(args), "op: grad_z and z overlap in their address ranges, must be apart");
  args.z.data = nullptr;
  args.act.data = memory + 10;
  EXPECT_EQ(refusal(args), "op: act and grad_z overlap in their address ranges, must be apart");
}

TEST(Footprint, LooksPastWhatTheCallDoesNotRead) {
  float memory[64];
  moire_unpermute_backward_args args{};
  args.rows = TensorView(memory, DType::kFP32, {4, 4});
  args.grad_rows = TensorView(memory, DType::kFP32, {4, 4});
  EXPECT_EQ(refusal(args), "") << "rows are for grad_weights";
  args.grad_weights = TensorView(memory + 32, DType::kFP32, {4, 4});
  EXPECT_EQ(refusal(args), "op: grad_rows and rows overlap in their address ranges, must be apart");
}

TEST(Footprint, TakesTheActOfAnMlpsBackwardAsSavedOrAsAnOutput) {
  float memory[64];
  moire_grouped_mlp_backward_args args{};
  args.act = args.z = TensorView(memory, DType::kFP32, {4, 4});
  args.act_is_saved = 1;
  EXPECT_EQ(refusal(args), "");
  args.act_is_saved = 0;
  EXPECT_EQ(refusal(args), "op: act and z overlap in their address ranges, must be apart");
}

TEST(Footprint, OfLongListsTakesNothingFromTheHeap) {
  constexpr int64_t kGroups = 1000;
  std::vector<float> memory(kGroups * 4);
  std::vector<const void*> list(kGroups), outputs(256);
  for (size_t g = 0; g < list.size(); ++g) list[g] = &memory[4 * g];
  moire_grouped_gemm_args args{};
  args.b = Weight(TensorView(nullptr, DType::kFP32, {kGroups, 2, 2}), list.data());
  EXPECT_EQ(refusal(args), "");
  const int64_t before = test::num_allocations();
  EXPECT_EQ(refusal(args), "");
  for (size_t g = 0; g < outputs.size(); ++g) outputs[g] = &memory[4 * g];
  moire_grouped_mlp_backward_args backward{};
  backward.grad_w1 = Weight(TensorView(nullptr, DType::kFP32, {256, 2, 2}), outputs.data());
  EXPECT_EQ(refusal(backward), "");
  EXPECT_EQ(test::num_allocations(), before);
  std::swap(list[3], outputs[7]);
  backward.w2 = args.b;
  backward.grad_w1.list = outputs.data();
  EXPECT_NE(refusal(backward).find("grad_w1["), std::string::npos);
}

}  // namespace
}  // namespace moire
