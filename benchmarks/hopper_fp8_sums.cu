// How do Hopper's FP8 tensor cores sum? Chains of one to four wgmma m64n128k32 are held bit for bit
// to a model of their sums, and to others that differ from it in one point each
// (docs/kernels/hopper_fp8_sums.md).
//
//   cmake --build --preset release --target hopper_fp8_sums
//   build/release/bin/hopper_fp8_sums
//
// First come sums made by hand, then a million of random and hostile operands of every pair of
// formats. Prints how many each model has wrong; exits with 1 if the first has any.
#include <cuda_runtime.h>
#include <thrust/device_vector.h>
#include <thrust/host_vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "core/fp8.h"
#include "core/fp8_tensor_core.h"

namespace {

using namespace moire::cuda::ptx;
using moire::E4M3, moire::E5M2;

constexpr int kM = 64, kN = 128, kK = 128, kStep = 32, kMaxSteps = kK / kStep;
constexpr int kSums = kM * kN;

// ---- the device ----

struct Formats {
  bool a_is_e5m2, b_is_e5m2;
  const char* name;
};
constexpr Formats kFormats[] = {{false, false, "e4m3*e4m3"},
                                {true, false, "e5m2*e4m3"},
                                {false, true, "e4m3*e5m2"},
                                {true, true, "e5m2*e5m2"}};

#define EIGHT(d, i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA(types)                                                                          \
  asm volatile(                                                                               \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                                    \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "    \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, " \
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
      "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}\n"  \
      : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40),     \
        EIGHT(d, 48), EIGHT(d, 56)                                                            \
      : "l"(a), "l"(b), "r"(accumulate))

template <int kPair>
__device__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (kPair == 0) WGMMA("e4m3.e4m3");
  if constexpr (kPair == 1) WGMMA("e5m2.e4m3");
  if constexpr (kPair == 2) WGMMA("e4m3.e5m2");
  if constexpr (kPair == 3) WGMMA("e5m2.e5m2");
}

// Codes [rows, 128] into rows of 128 bytes with the 128-byte swizzle.
__device__ void stage(const uint8_t* codes, int rows, char* shared) {
  for (int i = threadIdx.x; i < rows * 8; i += 128) {
    const int row = i / 8, chunk = i % 8;
    reinterpret_cast<int4*>(shared)[row * 8 + (chunk ^ (row % 8))] =
        reinterpret_cast<const int4*>(codes)[i];
  }
}

// d = c + a b^T of one block of sums, by kSteps instructions: in one group, or each waited for.
template <int kPair, int kSteps, bool kWaits>
__global__ void __launch_bounds__(128)
    multiply(const uint8_t* a, const uint8_t* b, const float* c, float* d) {
  __shared__ alignas(1024) char shared_a[kM * kK];
  __shared__ alignas(1024) char shared_b[kN * kK];
  stage(a + int64_t{blockIdx.x} * kM * kK, kM, shared_a);
  stage(b + int64_t{blockIdx.x} * kN * kK, kN, shared_b);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const auto place = [&](int i) {
    return int64_t{blockIdx.x} * kSums + (row + i / 2 % 2 * 8) * kN + column + i / 4 * 8 + i % 2;
  };
  float sums[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = c != nullptr ? c[place(i)] : 0;
  const auto address = [](const char* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  };
  const uint64_t from_a = whole_descriptor(operand_descriptor(address(shared_a)));
  const uint64_t from_b = whole_descriptor(operand_descriptor(address(shared_b)));
  keep_behind(sums);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma<kPair>(sums, from_a + step * 2, from_b + step * 2, c != nullptr || step > 0);
    if (kWaits && step + 1 < kSteps) {
      wgmma_commit_group();
      wgmma_wait_group<0>();
      keep_behind(sums);
      wgmma_fence();
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  keep_behind(sums);
#pragma unroll
  for (int i = 0; i < 64; ++i) d[place(i)] = sums[i];
}

template <int kPair>
auto kernel_of(int steps, bool waits) {
  return steps == 1   ? multiply<kPair, 1, false>
         : steps == 2 ? multiply<kPair, 2, false>
         : waits      ? multiply<kPair, 4, true>
                      : multiply<kPair, 4, false>;
}

// Blocks of sums: operands [blocks, rows, 128], what is added to (empty: nothing).
struct Operands {
  explicit Operands(int pair_, int64_t blocks_, bool with_c = false)
      : pair(pair_), blocks(blocks_), a(blocks * kM * kK), b(blocks * kN * kK) {
    if (with_c) c.resize(blocks * kSums);
  }
  int pair;
  int64_t blocks;
  std::vector<uint8_t> a, b;
  std::vector<float> c;
};

std::vector<float> run(const Operands& o, int steps, bool waits = false) {
  const thrust::device_vector<uint8_t> a(o.a), b(o.b);
  const thrust::device_vector<float> c(o.c);
  thrust::device_vector<float> d(o.blocks * kSums, -1.0F);
  const auto kernel = o.pair == 0   ? kernel_of<0>(steps, waits)
                      : o.pair == 1 ? kernel_of<1>(steps, waits)
                      : o.pair == 2 ? kernel_of<2>(steps, waits)
                                    : kernel_of<3>(steps, waits);
  kernel<<<static_cast<unsigned>(o.blocks), 128>>>(
      a.data().get(), b.data().get(), o.c.empty() ? nullptr : c.data().get(), d.data().get());
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
    std::fprintf(stderr, "hopper_fp8_sums: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
  const thrust::host_vector<float> out = d;
  return {out.begin(), out.end()};
}

// ---- models ----

// Which exponents of products the largest is sought among: the sums of what the bits of both
// factors state, of zeros too, of the factors as numbers, or the product's own.
enum class Exponent { kFields, kFieldsOfZerosToo, kFactors, kProduct };
enum class Cut { kZero, kFloor, kNearest };

struct Model {
  const char* name = "core/fp8_tensor_core.h";  // alone: that
  int length = 32;                              // products that are aligned together
  int fraction = 13;                            // bits kept below the largest exponent
  Cut cut = Cut::kZero;
  Exponent exponent = Exponent::kFields;
  bool joint = true;  // the accumulator is aligned with the products, else added afterwards
  int out_bits = 13;  // of the sum's mantissa
  Cut out_cut = Cut::kZero;
};
const Model kModels[] = {
    {},
    {.name = "16 products together", .length = 16},
    {.name = "14 bits", .fraction = 14},
    {.name = "cut downwards", .cut = Cut::kFloor},
    {.name = "zeros have exponents", .exponent = Exponent::kFieldsOfZerosToo},
    {.name = "subnormal factors normalised", .exponent = Exponent::kFactors},
    {.name = "products normalised", .exponent = Exponent::kProduct},
    {.name = "the accumulator added afterwards", .joint = false},
    {.name = "sums kept to 14 bits", .out_bits = 14},
    {.name = "sums kept in FP32", .out_bits = 23},
    {.name = "sums cut downwards", .out_cut = Cut::kFloor},
    {.name = "sums rounded", .out_cut = Cut::kNearest},
};
constexpr int kNumModels = std::size(kModels);

constexpr int kNone = -10000;
int exponent_of(double x) { return x == 0 ? kNone : std::ilogb(x); }

double cut_to(double x, int exponent, Cut cut) {
  const double units = x * std::ldexp(1.0, -exponent);
  const double whole = cut == Cut::kZero    ? std::trunc(units)
                       : cut == Cut::kFloor ? std::floor(units)
                                            : std::nearbyint(units);
  return whole * std::ldexp(1.0, exponent);
}

// A decoded element and the exponent that its bits state.
struct Element {
  double value;
  int field;
};
Element decode(uint8_t code, bool is_e5m2) {
  const int field = is_e5m2 ? std::max(code >> 2 & 31, 1) - 15 : std::max(code >> 3 & 15, 1) - 7;
  return {is_e5m2 ? moire::fp8_to_float<E5M2>(code) : moire::fp8_to_float<E4M3>(code), field};
}

// The products of one sum, and their exponents by every rule.
struct Products {
  float a[kK], b[kK];
  int least_a, least_b;
  double value[kK];
  int exponent[4][kK];
};
Products products_of(const Operands& o, int64_t sum) {
  const int64_t block = sum / kSums;
  const uint8_t* a = o.a.data() + (block * kM + sum % kSums / kN) * kK;
  const uint8_t* b = o.b.data() + (block * kN + sum % kN) * kK;
  Products p;
  p.least_a = kFormats[o.pair].a_is_e5m2 ? -14 : -6;
  p.least_b = kFormats[o.pair].b_is_e5m2 ? -14 : -6;
  for (int k = 0; k < kK; ++k) {
    const Element x = decode(a[k], kFormats[o.pair].a_is_e5m2);
    const Element y = decode(b[k], kFormats[o.pair].b_is_e5m2);
    p.a[k] = static_cast<float>(x.value);
    p.b[k] = static_cast<float>(y.value);
    p.value[k] = x.value * y.value;
    const bool is_zero = p.value[k] == 0;
    p.exponent[1][k] = x.field + y.field;
    p.exponent[0][k] = is_zero ? kNone : x.field + y.field;
    p.exponent[2][k] = is_zero ? kNone : exponent_of(x.value) + exponent_of(y.value);
    p.exponent[3][k] = exponent_of(p.value[k]);
  }
  return p;
}

double add(const Model& m, double sum, const double* values, const int* exponents) {
  int largest = *std::max_element(exponents, exponents + m.length);
  if (m.joint) largest = std::max(largest, exponent_of(sum));
  if (largest != kNone) {
    const int unit = largest - m.fraction;
    const double scale = std::ldexp(1.0, -unit);
    int64_t units = 0;
    for (int i = 0; i < m.length; ++i) {
      const double x = values[i] * scale;
      const auto whole = static_cast<int64_t>(x);
      units += whole - (m.cut == Cut::kFloor && static_cast<double>(whole) > x ? 1 : 0);
    }
    sum = (m.joint ? cut_to(sum, unit, m.cut) : sum) +
          static_cast<double>(units) * std::ldexp(1.0, unit);
  }
  return sum == 0 ? 0 : cut_to(sum, exponent_of(sum) - m.out_bits, m.out_cut);
}

float sum_of(const Model& m, const Products& p, double sum, int steps) {
  for (int k = 0; k < steps * kStep && &m == kModels; k += kStep) {
    sum =
        moire::add_products(static_cast<float>(sum), {p.a, p.least_a}, {p.b, p.least_b}, k, kStep);
  }
  for (int k = 0; k < steps * kStep && &m != kModels; k += m.length) {
    sum = add(m, sum, p.value + k, p.exponent[static_cast<int>(m.exponent)] + k);
  }
  return static_cast<float>(sum);
}

bool same(float x, float y) {
  return std::memcmp(&x, &y, sizeof x) == 0 || (x == 0 && y == 0) ||
         (std::isnan(x) && std::isnan(y));
}

// ---- sums made by hand ----

struct Term {
  int k;
  double a, b;  // elements as numbers
};
struct Trial {
  std::string name;
  std::vector<Term> terms;
  double c = 0;
  int steps = 1;
};

// The code of a number that the format has.
uint8_t code_of(double x, bool is_e5m2) {
  for (int code = 0; code < 256; ++code) {
    const double value = decode(static_cast<uint8_t>(code), is_e5m2).value;
    if (value == x && std::signbit(value) == std::signbit(x)) {
      return static_cast<uint8_t>(code);
    }
  }
  std::abort();
}

// 2^e (1.0 or m times it) as a product of elements that E4M3 has.
Term power(int k, int e, double m = 1) {
  const int half = std::clamp(e / 2, -9, 8);
  return {k, std::ldexp(m, half), std::ldexp(1.0, e - half)};
}

// Trial i is sum [r, r] of a block.
int64_t place_of(size_t i) { return static_cast<int64_t>(i / kM * kSums + i % kM * kN + i % kM); }
Operands operands_of(int pair, const std::vector<Trial>& trials) {
  Operands o(pair, static_cast<int64_t>(trials.size() + kM - 1) / kM, true);
  for (size_t i = 0; i < trials.size(); ++i) {
    const size_t block = i / kM, row = i % kM;
    for (const Term& t : trials[i].terms) {
      o.a[(block * kM + row) * kK + t.k] = code_of(t.a, kFormats[pair].a_is_e5m2);
      o.b[(block * kN + row) * kK + t.k] = code_of(t.b, kFormats[pair].b_is_e5m2);
    }
    o.c[place_of(i)] = static_cast<float>(trials[i].c);
  }
  return o;
}

void add_pairs(std::vector<Trial>& trials, int j, double sign) {
  const Term small = power(1, -j, sign);
  const char* s = sign > 0 ? "+" : "-";
  const auto add = [&](const char* name, std::vector<Term> terms, double c = 0, int steps = 1) {
    trials.push_back({name + (s + std::to_string(j)), std::move(terms), c, steps});
  };
  add("1 & 2^-", {power(0, 0), small});
  add("-1 & 2^-", {power(0, 0, -1), small});
  add("c = 1 & 2^-", {small}, 1);
  add("1 & c = 2^-", {power(0, 0)}, sign * std::ldexp(1, -j));
  add("-1 & c = 2^-", {power(0, 0, -1)}, sign * std::ldexp(1, -j));
  add("1, then 2^-", {power(0, 0), power(32, -j, sign)}, 0, 2);
  add("2^-x, then 1", {power(0, -j, sign), power(32, 0)}, 0, 2);
  add("1.75 * 1.75 & 2^-", {{0, 1.75, 1.75}, small});
  add("1.5 * 2^-8 * 2^8 & 2^-", {{0, 0x1.8p-8, 0x1p8}, small});  // subnormal in E4M3
  add("0 * 2^8 & 2^-", {{0, 0.0, 0x1p8}, small});
  add("c = 1 + 2^-", {}, sign * (1 + std::ldexp(1, -j)));
  add("c = 1 + 2^-x, 1 & -1", {power(0, 0), power(1, 0, -1)}, sign * (1 + std::ldexp(1, -j)));
  add("c = 1 + 2^-x, all steps", {}, sign * (1 + std::ldexp(1, -j)), 4);
  std::vector<Term> many = {power(0, 0)}, wide = {power(31, -j, sign)};
  for (int k = 1; k < 32; ++k) many.push_back(power(k, -j, sign));
  for (int k = 0; k < 30; ++k) wide.push_back({k, 1.5, 2.0});
  add("1 & 31 of 2^-", many);
  add("30 of 1.5 * 2 & 2^-", wide);
}

// 2^10 at k = i, its negative at j: where does a small product survive?
void add_positions(std::vector<Trial>& trials) {
  for (int i = 0; i < 64; i += 9) {
    for (int j = 0; j < 64; j += 5) {
      for (int k = 0; k < 64; ++k) {
        Trial t{"positions " + std::to_string((i * 64 + j) * 64 + k), {}, 0, 2};
        if (i != j) t.terms = {power(i, 10), power(j, 10, -1)};
        if (k != i && k != j) t.terms.push_back(power(k, -9));
        trials.push_back(t);
      }
    }
  }
}

// ---- random operands ----

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545F4914F6CDD1DU >> 11;
  }
  double uniform() { return static_cast<double>(bits() & 0xFFFFFFFFFFFF) * 0x1p-48; }
  double normal() {
    return std::sqrt(-2 * std::log(uniform() + 0x1p-50)) * std::cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t state_;
};

enum class Data { kNormal, kCodes, kWide, kSparse };

uint8_t draw(Random& r, Data data, bool is_e5m2) {
  const auto encode = [&](double x) {
    return is_e5m2 ? moire::float_to_fp8<E5M2>(static_cast<float>(x))
                   : moire::float_to_fp8<E4M3>(static_cast<float>(x));
  };
  const auto any = [&] {
    for (;;) {
      const auto code = static_cast<uint8_t>(r.bits());
      if (std::isfinite(decode(code, is_e5m2).value)) return code;
    }
  };
  switch (data) {
    case Data::kNormal:
      return encode(r.normal() * (is_e5m2 ? 14000 : 110));
    case Data::kCodes:
      return any();
    case Data::kWide:
      return encode(r.normal() * std::exp2(r.uniform() * -24 + (is_e5m2 ? 14 : 7)));
    case Data::kSparse:
      return r.bits() % 4 == 0 ? any() : uint8_t{0};
  }
  return 0;
}

Operands random_operands(int pair, Data data, int64_t blocks, bool with_c, uint64_t seed) {
  Operands o(pair, blocks, with_c);
  Random r(seed);
  for (uint8_t& code : o.a) code = draw(r, data, kFormats[pair].a_is_e5m2);
  for (uint8_t& code : o.b) code = draw(r, data, kFormats[pair].b_is_e5m2);
  for (float& c : o.c) {
    const int range = 12 + (kFormats[pair].a_is_e5m2 + kFormats[pair].b_is_e5m2) * 7;
    c = static_cast<float>(r.normal() * std::exp2(range - r.uniform() * range));
  }
  return o;
}

// Adds to `wrong` how many sums each model has wrong, of those that `use` names.
void count(const Operands& o, const std::vector<float>& d, int steps,
           const std::vector<int64_t>& use, std::atomic<int64_t> (&wrong)[kNumModels]) {
  std::vector<std::thread> threads(std::max(1U, std::thread::hardware_concurrency()));
  for (size_t t = 0; t < threads.size(); ++t) {
    threads[t] = std::thread([&, t] {
      for (size_t i = t; i < use.size(); i += threads.size()) {
        const Products products = products_of(o, use[i]);
        const double start = o.c.empty() ? 0 : o.c[use[i]];
        for (int m = 0; m < kNumModels; ++m) {
          if (!same(sum_of(kModels[m], products, start, steps), d[use[i]])) ++wrong[m];
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

int64_t report(const char* what, size_t sums, const std::atomic<int64_t> (&wrong)[kNumModels]) {
  std::printf("%s: %zu sums\n", what, sums);
  for (int m = 0; m < kNumModels; ++m) {
    std::printf("  %8lld wrong: %s\n", static_cast<long long>(wrong[m]), kModels[m].name);
  }
  std::fflush(stdout);
  return wrong[0];
}

int64_t try_by_hand(int pair) {
  std::vector<Trial> trials;
  for (int j = 8; j <= 18; ++j) {
    for (const double sign : {1.0, -1.0}) add_pairs(trials, j, sign);
  }
  add_positions(trials);
  std::atomic<int64_t> wrong[kNumModels] = {};
  for (const int steps : {1, 2, kMaxSteps}) {
    const Operands o = operands_of(pair, trials);
    const std::vector<float> d = run(o, steps);
    std::vector<int64_t> use;
    for (size_t i = 0; i < trials.size(); ++i) {
      if (trials[i].steps == steps) use.push_back(place_of(i));
    }
    count(o, d, steps, use, wrong);
  }
  return report((std::string(kFormats[pair].name) + ", by hand").c_str(), trials.size(), wrong);
}

// A million sums of one to four instructions, from zero and added to FP32.
int64_t try_random(int pair) {
  constexpr int64_t kBlocks = 8;
  std::atomic<int64_t> wrong[kNumModels] = {};
  std::vector<int64_t> all(kBlocks * kSums);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  size_t sums = 0;
  int64_t changed = 0;
  for (int data = 0; data < 4; ++data) {
    for (const bool with_c : {false, true}) {
      for (const int steps : {1, kMaxSteps}) {
        const uint64_t seed = 1000 + pair * 100 + data * 10 + with_c * 5 + steps;
        const Operands o = random_operands(pair, Data(data), kBlocks, with_c, seed);
        const std::vector<float> d = run(o, steps);
        count(o, d, steps, all, wrong);
        sums += all.size();
        if (steps < kMaxSteps) continue;
        const std::vector<float> waited = run(o, steps, true);
        for (size_t i = 0; i < d.size(); ++i) changed += !same(d[i], waited[i]);
      }
    }
  }
  std::printf("%s: %lld sums change where each instruction is waited for\n", kFormats[pair].name,
              static_cast<long long>(changed));
  return changed + report((std::string(kFormats[pair].name) + ", random").c_str(), sums, wrong);
}

}  // namespace

int main() {
  int64_t wrong = 0;
  for (int pair = 0; pair < 4; ++pair) wrong += try_by_hand(pair) + try_random(pair);
  return wrong == 0 ? 0 : 1;
}
