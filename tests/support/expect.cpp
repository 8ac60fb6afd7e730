#include "tests/support/expect.h"

#include <algorithm>
#include <cstring>

#include "tests/support/outputs.h"

namespace moire::test {
namespace {

using reference::TailRule;

testing::AssertionResult result(const reference::OutputErrors& errors) {
  if (errors.mismatches == 0) {
    return testing::AssertionSuccess() << errors.elements << " elements agree";
  }
  return testing::AssertionFailure() << errors.mismatches << " elements of " << errors.elements
                                     << " differ, " << errors.first_mismatch;
}

// f(its first byte, how many) of each row of each output.
template <class F>
void for_each_row(const Written& outputs, const F& f) {
  const auto visit = [&](const TensorView& t) {
    const int64_t size = dtype_size(t.type()), pitch = t.rank == 1 ? 1 : t.stride();
    const int64_t rows = t.rank == 1 ? 1 : t.num_rows();
    for (int64_t i = 0; i < rows; ++i) {
      f(static_cast<std::byte*>(t.data) + i * pitch * size,
        static_cast<size_t>(t.columns() * size));
    }
  };
  for (const auto& [name, t] : outputs.tensors) visit(t);
  for (const auto& [name, w] : outputs.weights) {
    for (int64_t g = 0; g < w.tensor.shape[0]; ++g) visit(Weight(w).matrix(g));
  }
}

}  // namespace

testing::AssertionResult all_match(const std::vector<reference::OutputErrors>& outputs) {
  for (const reference::OutputErrors& e : outputs) {
    if (e.mismatches > 0) return result(e) << ", of " << e.name;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult same_written(const Written& got, const Written& want) {
  const auto compared = [](const auto& some, const auto& others) {
    if (some.size() != others.size()) return testing::AssertionFailure() << "not as many outputs";
    for (size_t i = 0; i < some.size(); ++i) {
      testing::AssertionResult result = same_bits(some[i].second, others[i].second);
      if (!result) return result << ", of " << some[i].first;
    }
    return testing::AssertionSuccess();
  };
  const testing::AssertionResult tensors = compared(got.tensors, want.tensors);
  return tensors ? compared(got.weights, want.weights) : tensors;
}

void poison(const Written& outputs) {
  for_each_row(outputs, [](std::byte* row, size_t bytes) { std::memset(row, 0xFF, bytes); });
}

std::vector<std::vector<std::byte>> bytes_of(const Written& outputs) {
  std::vector<std::vector<std::byte>> out;
  for_each_row(outputs,
               [&](const std::byte* row, size_t bytes) { out.emplace_back(row, row + bytes); });
  return out;
}

testing::AssertionResult matches(const TensorView& got, const reference::Matrix& want,
                                 const moire_groups& groups) {
  return result(reference::compare(got, want, {TailRule::kAnything, groups}));
}

testing::AssertionResult matches(const moire_weight& got, const reference::Weights& want) {
  return result(reference::compare(got, want));
}

testing::AssertionResult same_bits(const TensorView& got, const TensorView& want, int64_t rows) {
  if (got.dtype != want.dtype) {
    return testing::AssertionFailure() << to_string(got) << " against " << to_string(want);
  }
  TensorView cut = got;
  if (rows >= 0) cut.shape[0] = rows;
  const bool is_vector = want.rank == 1;
  const int64_t all = is_vector ? want.columns() : want.num_rows();
  const int64_t size = dtype_size(want.type()), stride = is_vector ? 1 : want.stride();
  reference::ByteRows bytes(rows < 0 ? all : rows, (is_vector ? 1 : want.columns()) * size);
  bytes.is_owned.assign(bytes.is_owned.size(), true);
  for (int64_t i = 0; i < bytes.rows; ++i) {
    const auto* const row = static_cast<const uint8_t*>(want.data) + i * stride * size;
    std::copy_n(row, bytes.row_bytes, &bytes.at(i, 0));
  }
  return result(reference::compare(cut, bytes));
}

testing::AssertionResult same_bits(const moire_weight& got, const moire_weight& want) {
  for (int64_t g = 0; g < got.tensor.shape[0]; ++g) {
    testing::AssertionResult result = same_bits(Weight(got).matrix(g), Weight(want).matrix(g));
    if (!result) return result << " of group " << g;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult same_bytes(const TensorView& got, const reference::ByteRows& want,
                                    int32_t tail) {
  return result(reference::compare(
      got, want, {tail == MOIRE_TAIL_ZERO ? TailRule::kZero : TailRule::kUntouched}));
}

testing::AssertionResult same_indices(const TensorView& got, const std::vector<int64_t>& want) {
  return result(reference::compare(got, want));
}

testing::AssertionResult tail_is_zero(const TensorView& t, const moire_groups& groups) {
  return result(reference::compare_tail(t, reference::rows_in_use(groups), TailRule::kZero));
}

testing::AssertionResult tail_is_untouched(const TensorView& t, const moire_groups& groups) {
  return result(reference::compare_tail(t, reference::rows_in_use(groups), TailRule::kUntouched));
}

testing::AssertionResult succeeds(const Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << code_name(status.code()) << ": " << status.message();
}

testing::AssertionResult fails(const Status& status, Code code, const std::string& text) {
  if (status.code() == code && status.message().find(text) != std::string::npos) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "got " << code_name(status.code()) << ": \"" << status.message() << "\"\nwant "
         << code_name(code) << ": \"..." << text << "...\"";
}

Context cpu(int num_threads) {
  ContextOptions options;
  options.num_threads = num_threads;
  return Context::create(options).value();
}

}  // namespace moire::test
