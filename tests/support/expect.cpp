#include "tests/support/expect.h"

#include <algorithm>

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

}  // namespace

testing::AssertionResult all_match(const std::vector<reference::OutputErrors>& outputs) {
  for (const reference::OutputErrors& e : outputs) {
    if (e.mismatches > 0) return result(e) << ", of " << e.name;
  }
  return testing::AssertionSuccess();
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
