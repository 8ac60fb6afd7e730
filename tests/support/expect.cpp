#include "tests/support/expect.h"

#include <cstring>
#include <iomanip>
#include <sstream>

namespace moire::test {
namespace {

// Collects mismatches: tells the first, counts them all.
class Mismatches {
 public:
  template <class Describe>
  void expect(bool condition, const Describe& describe) {
    ++num_compared_;
    if (condition) return;
    if (num_++ == 0) describe(first_ << std::setprecision(17));
  }
  void fail(const std::string& reason) {
    ++num_;
    first_ << reason;
  }
  testing::AssertionResult result() const {
    if (num_ == 0) return testing::AssertionSuccess() << num_compared_ << " elements agree";
    return testing::AssertionFailure()
           << num_ << " of " << num_compared_ << " elements differ; the first: " << first_.str();
  }

 private:
  int64_t num_ = 0, num_compared_ = 0;
  std::ostringstream first_;
};

std::string group_of(int64_t row, const moire_groups& groups) {
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    if (row < groups.offsets[g + 1]) {
      return " (group " + std::to_string(g) + ", its row " +
             std::to_string(row - groups.offsets[g]) + ")";
    }
  }
  return "";
}

// A vector over rows reads as a column.
int64_t rows_of(const TensorView& t) { return t.rank == 1 ? t.columns() : t.num_rows(); }
int64_t row_length(const TensorView& t) { return t.rank == 1 ? 1 : t.columns(); }
double element(const TensorView& t, int64_t row, int64_t column) {
  return t.rank == 1 ? reference::read_element(t, 0, row) : reference::read_element(t, row, column);
}

const std::byte* row_address(const TensorView& t, int64_t row) {
  const int64_t stride = t.rank == 1 ? 1 : t.stride();
  return static_cast<const std::byte*>(t.data) + row * stride * dtype_size(t.type());
}

// The matrix of one group, or all of them.
TensorView matrix_of(const moire_weight& w, int64_t group) { return Weight(w).matrix(group); }

void compare(const TensorView& got, const reference::Matrix& want, const moire_groups& groups,
             const std::string& prefix, Mismatches* mismatches) {
  if (rows_of(got) < want.rows || row_length(got) != want.columns) {
    mismatches->fail(prefix + to_string(got) + " cannot hold [" + std::to_string(want.rows) + ", " +
                     std::to_string(want.columns) + "]");
    return;
  }
  for (int64_t i = 0; i < want.rows; ++i) {
    for (int64_t j = 0; j < want.columns; ++j) {
      const reference::Number& wanted = want.at(i, j);
      const double value = element(got, i, j);
      mismatches->expect(reference::accepts(got.type(), wanted, value), [&](std::ostream& out) {
        out << prefix << "[" << i << ", " << j << "]" << group_of(i, groups) << " is " << value
            << ", want " << wanted.value << " within " << wanted.bound << " before rounding to "
            << dtype_name(got.type());
      });
    }
  }
}

testing::AssertionResult tail_is(const TensorView& t, const moire_groups& groups, std::byte want) {
  Mismatches mismatches;
  const int64_t bytes = row_length(t) * dtype_size(t.type());
  for (int64_t i = reference::rows_in_use(groups); i < rows_of(t); ++i) {
    for (int64_t j = 0; j < bytes; ++j) {
      const std::byte got = row_address(t, i)[j];
      mismatches.expect(got == want, [&](std::ostream& out) {
        out << "byte " << j << " of tail row " << i << " is " << std::to_integer<int>(got)
            << ", want " << std::to_integer<int>(want);
      });
    }
  }
  return mismatches.result();
}

}  // namespace

testing::AssertionResult matches(const TensorView& got, const reference::Matrix& want,
                                 const moire_groups& groups) {
  Mismatches mismatches;
  compare(got, want, groups, "", &mismatches);
  return mismatches.result();
}

testing::AssertionResult matches(const moire_weight& got, const reference::Weights& want) {
  Mismatches mismatches;
  if (got.tensor.shape[0] != static_cast<int64_t>(want.size())) {
    mismatches.fail("got " + std::to_string(got.tensor.shape[0]) + " groups, want " +
                    std::to_string(want.size()));
    return mismatches.result();
  }
  for (int64_t g = 0; g < got.tensor.shape[0]; ++g) {
    compare(matrix_of(got, g), want[static_cast<size_t>(g)], {}, "group " + std::to_string(g) + " ",
            &mismatches);
  }
  return mismatches.result();
}

testing::AssertionResult same_bits(const TensorView& got, const TensorView& want, int64_t rows) {
  Mismatches mismatches;
  if (got.dtype != want.dtype || row_length(got) != row_length(want) ||
      (rows < 0 && rows_of(got) != rows_of(want))) {
    mismatches.fail(to_string(got) + " against " + to_string(want));
    return mismatches.result();
  }
  const int64_t size = dtype_size(got.type());
  for (int64_t i = 0; i < (rows < 0 ? rows_of(got) : rows); ++i) {
    for (int64_t j = 0; j < row_length(got); ++j) {
      const bool same = std::memcmp(row_address(got, i) + j * size, row_address(want, i) + j * size,
                                    static_cast<size_t>(size)) == 0;
      mismatches.expect(same, [&](std::ostream& out) {
        out << "[" << i << ", " << j << "] is " << element(got, i, j) << ", want "
            << element(want, i, j);
      });
    }
  }
  return mismatches.result();
}

testing::AssertionResult same_bits(const moire_weight& got, const moire_weight& want) {
  for (int64_t g = 0; g < got.tensor.shape[0]; ++g) {
    testing::AssertionResult result = same_bits(matrix_of(got, g), matrix_of(want, g));
    if (!result) return result << " of group " << g;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult same_bytes(const TensorView& got, const reference::ByteRows& want,
                                    int32_t tail) {
  Mismatches mismatches;
  const int64_t row_bytes = got.columns() * dtype_size(got.type());
  if (got.num_rows() != want.rows || row_bytes != want.row_bytes) {
    mismatches.fail(to_string(got) + ", want " + std::to_string(want.rows) + " rows of " +
                    std::to_string(want.row_bytes) + " bytes");
    return mismatches.result();
  }
  for (int64_t i = 0; i < want.rows; ++i) {
    const bool is_owned = want.is_owned[static_cast<size_t>(i)];
    for (int64_t j = 0; j < row_bytes; ++j) {
      const int byte = std::to_integer<int>(row_address(got, i)[j]);
      const int unowned = tail == MOIRE_TAIL_ZERO ? 0 : 0xFF;
      const int wanted = is_owned ? want.bytes[static_cast<size_t>(i * row_bytes + j)] : unowned;
      mismatches.expect(byte == wanted, [&](std::ostream& out) {
        out << "byte " << j << " of row " << i << (is_owned ? "" : " (that nothing owns)") << " is "
            << byte << ", want " << wanted;
      });
    }
  }
  return mismatches.result();
}

testing::AssertionResult same_indices(const TensorView& got, const std::vector<int64_t>& want) {
  Mismatches mismatches;
  if (got.num_elements() != static_cast<int64_t>(want.size())) {
    mismatches.fail(to_string(got) + ", want " + std::to_string(want.size()) + " elements");
    return mismatches.result();
  }
  for (int64_t i = 0; i < got.num_elements(); ++i) {
    const int64_t row = i / got.columns(), column = i % got.columns();
    const int64_t index = reference::read_index(got, row, column);
    mismatches.expect(index == want[static_cast<size_t>(i)], [&](std::ostream& out) {
      out << "[" << row << ", " << column << "] is " << index << ", want "
          << want[static_cast<size_t>(i)];
    });
  }
  return mismatches.result();
}

testing::AssertionResult tail_is_zero(const TensorView& t, const moire_groups& groups) {
  return tail_is(t, groups, std::byte{0});
}

testing::AssertionResult tail_is_untouched(const TensorView& t, const moire_groups& groups) {
  return tail_is(t, groups, std::byte{0xFF});
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
