#include "operands.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "commands.h"
#include "machine.h"
#include "reference/fp8.h"
#include "reference/tensor.h"
#include "staging/random.h"
#include "text.h"

namespace moire::tool {
namespace {

using staging::Random;

// Elements after which data repeat: a prime, so that no row of a matrix repeats at the same place.
constexpr int64_t kPeriod = 1048573;
constexpr int kPoisonByte = 0xFF;             // NaN in every float type
constexpr int64_t kPoisonIndex = 0x7F7F7F7F;  // far outside every tensor

bool is_index(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

void write_index(const TensorView& t, int64_t i, int64_t value) {
  if (t.type() == DType::kInt32) {
    static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(value);
  } else {
    static_cast<int64_t*>(t.data)[i] = value;
  }
}

// kPeriod standard normal numbers; every tensor starts at a place of its own.
const std::vector<float>& normal_numbers() {
  static const std::vector<float> numbers = [] {
    std::vector<float> out(static_cast<size_t>(kPeriod));
    Random random(0);
    for (float& x : out) x = static_cast<float>(random.normal());
    return out;
  }();
  return numbers;
}

// The splits, and the routing of operands that are filled, lie on the host beside the operands.
const Problem& with_arrays_that_fit(const Problem& p, Operands::Content content) {
  constexpr double kBytesPerGroup = 64, kBytesPerRow = Operands::kRoutingBytes;
  const bool routes = content != Operands::Content::kNone;
  const double needed = kBytesPerGroup * static_cast<double>(p.groups) +
                        (routes ? kBytesPerRow * static_cast<double>(p.capacity()) : 0);
  const int64_t free = available_memory_bytes();
  if (needed <= static_cast<double>(free)) return p;
  throw UsageError("found groups and rows whose lists alone take ",
                   human_bytes(static_cast<int64_t>(needed)), ", needed at most the ",
                   human_bytes(free), " that this machine has free: ", to_line(p));
}

uint64_t hash(const std::string& name) {  // FNV-1a
  uint64_t h = 0xCBF29CE484222325ULL;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return h;
}

const std::vector<uint8_t>& normal_codes(DType element) {
  constexpr size_t kCodes = 65521;  // after which they repeat: a prime
  const auto make = [](DType type) {
    std::vector<uint8_t> codes(kCodes);
    Random random(1);
    for (uint8_t& code : codes) {
      code = reference::encode_fp8(type, random.normal() * Operands::reach(type));
    }
    return codes;
  };
  static const std::vector<uint8_t> e4m3 = make(DType::kE4M3), e5m2 = make(DType::kE5M2);
  return element == DType::kE4M3 ? e4m3 : e5m2;
}

}  // namespace

void fill_normal(const TensorView& t, uint64_t seed, double scale) {
  const std::vector<float>& numbers = normal_numbers();
  auto place = static_cast<int64_t>(Random(seed).below(kPeriod));
  const TensorView elements(t.data, t.type(), {t.num_elements()});
  for (int64_t i = 0, n = std::min(t.num_elements(), kPeriod); i < n; ++i) {
    const double value = static_cast<double>(numbers[static_cast<size_t>(place)]) * scale;
    if (t.type() == DType::kFP32) {
      static_cast<float*>(t.data)[i] = static_cast<float>(value);
    } else {
      reference::write_element(elements, 0, i, value);
    }
    place = place + 1 == kPeriod ? 0 : place + 1;
  }
  // The others repeat them.
  const int64_t period = kPeriod * dtype_size(t.type());
  auto* const data = static_cast<char*>(t.data);
  for (int64_t done = period, total = t.num_bytes(); done < total; done += period) {
    std::memcpy(data + done, data, static_cast<size_t>(std::min(period, total - done)));
  }
}

Operands::Operands(const Problem& problem, Content content)
    : problem_(problem),
      content_(content),
      memory_(has_content() ? Memory::Backing::kPages : Memory::Backing::kNone),
      splits_(make_splits(with_arrays_that_fit(problem, content))),
      offsets_(splits_.size() + 1, 0) {
  for (size_t g = 0; g < splits_.size(); ++g) offsets_[g + 1] = offsets_[g] + splits_[g];
  groups_ = Groups(offsets_.data(), problem.groups, problem.capacity());
  if (has_content()) route();
}

int64_t Operands::group_of(int64_t row) const {
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), row);
  return after == offsets_.end() ? -1 : after - offsets_.begin() - 1;
}

// Choices are dealt to experts at random so that expert g gets splits[g]; those left over are
// dropped, by -1 and by G in turn. Rows are stable in token order within an expert.
void Operands::route() {
  const int64_t num_choices = problem_.tokens() * problem_.topk;
  Random random(problem_.seed ^ hash("routing"));
  for (int64_t g = 0; g < problem_.groups; ++g) {
    expert_of_choice_.insert(expert_of_choice_.end(),
                             static_cast<size_t>(splits_[static_cast<size_t>(g)]), g);
  }
  while (static_cast<int64_t>(expert_of_choice_.size()) < num_choices) {
    expert_of_choice_.push_back(expert_of_choice_.size() % 2 == 0 ? -1 : problem_.groups);
  }
  random.shuffle(expert_of_choice_);
  token_of_row_.assign(static_cast<size_t>(problem_.capacity()), -1);
  row_of_choice_.assign(static_cast<size_t>(num_choices), -1);
  std::vector<int64_t> next(offsets_.begin(), offsets_.end());
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    const int64_t expert = expert_of_choice_[static_cast<size_t>(choice)];
    if (expert < 0 || expert >= problem_.groups) continue;
    const int64_t row = next[static_cast<size_t>(expert)]++;
    token_of_row_[static_cast<size_t>(row)] = choice / problem_.topk;
    row_of_choice_[static_cast<size_t>(choice)] = row;
  }
}

TensorView Operands::take(const std::string& name, DType dtype, const Shape& shape) {
  TensorView t;
  t.dtype = static_cast<int32_t>(dtype);
  int64_t bytes = dtype_size(dtype);
  for (const int64_t size : shape) {
    t.shape[t.rank++] = size;
    const bool is_too_large = __builtin_mul_overflow(bytes, size, &bytes);
    if (is_too_large) bytes = std::numeric_limits<int64_t>::max();
  }
  t.data = memory_.take(name, bytes);
  return t;
}

void Operands::fill_normal(const TensorView& t, const std::string& name, double scale) const {
  if (has_content()) tool::fill_normal(t, problem_.seed ^ hash(name), scale);
}

void Operands::poison(const TensorView& t, int64_t first_row) const {
  if (!is_judged() || t.num_elements() == 0) return;
  const int64_t from = t.rank == 1 ? first_row : first_row * t.stride();
  if (is_index(t.type())) {
    for (int64_t i = from; i < t.num_elements(); ++i) write_index(t, i, kPoisonIndex);
    return;
  }
  const int64_t skipped = from * dtype_size(t.type());
  std::memset(static_cast<char*>(t.data) + skipped, kPoisonByte,
              static_cast<size_t>(t.num_bytes() - skipped));
}

void Operands::poison_tail(const TensorView& t) const {
  if (problem_.tail > 0) poison(t, problem_.rows);
}

void Operands::fill_uniform(const TensorView& t, const std::string& name) const {
  if (!has_content()) return;
  Random random(problem_.seed ^ hash(name));
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    static_cast<float*>(t.data)[i] = static_cast<float>(random.uniform());
  }
}

void Operands::fill_indices(const TensorView& t, const std::vector<int64_t>& values) const {
  if (!has_content()) return;
  for (size_t i = 0; i < values.size(); ++i) write_index(t, static_cast<int64_t>(i), values[i]);
}

void Operands::fill_codes(const TensorView& t, const std::string& name, Values values) const {
  if (!has_content()) return;
  const std::vector<uint8_t>& codes = normal_codes(t.type());
  Random random(problem_.seed ^ hash(name));
  const bool is_any = values == Values::kAny && is_judged();
  auto place = static_cast<size_t>(random.below(static_cast<int64_t>(codes.size())));
  auto* const data = static_cast<uint8_t*>(t.data);
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    // The second highest bit is the first of the exponent, which is below the bias without it.
    data[i] = is_any ? static_cast<uint8_t>(random.bits() & 0xBF) : codes[place];
    place = place + 1 == codes.size() ? 0 : place + 1;
  }
}

void Operands::fill_scales(const TensorView& t, const std::string& name, Values values,
                           double scale, int64_t block_rows) const {
  if (!has_content()) return;
  Random random(problem_.seed ^ hash(name));
  const bool is_any = values == Values::kAny && is_judged();
  const int middle = is_any ? 0 : std::ilogb(scale), reach = is_any ? 10 : 1;
  const auto fill_rows = [&](int64_t first, int64_t count) {
    for (int64_t i = first * t.columns(); i < (first + count) * t.columns(); ++i) {
      const int exponent = middle + static_cast<int>(random.below(2 * reach + 1)) - reach;
      if (t.type() == DType::kE8M0) {
        static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(127 + exponent);
      } else {
        const double fraction = is_any || problem_.fractional ? random.uniform() : 0;
        static_cast<float*>(t.data)[i] = static_cast<float>(std::ldexp(1 + fraction, exponent));
      }
    }
  };
  poison(t);
  if (block_rows == 0) return fill_rows(0, t.num_rows());
  for (int64_t g = 0; g < problem_.groups; ++g) {
    const int64_t first = groups_.offsets[g], rows = groups_.offsets[g + 1] - first;
    const int64_t at = block_rows == 1 ? first : first / block_rows + g;
    fill_rows(at, (rows + block_rows - 1) / block_rows);
  }
}

TensorView Operands::output(const std::string& name, DType dtype, const Shape& shape) {
  const TensorView t = take(name, dtype, shape);
  poison(t);
  return t;
}

Workspace Operands::workspace(size_t bytes) {
  const TensorView t = output("workspace", DType::kUint8, {static_cast<int64_t>(bytes)});
  return {t.data, bytes};
}

}  // namespace moire::tool
