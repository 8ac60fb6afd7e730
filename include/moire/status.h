// Status and Result: how every function of moire says whether it worked.
#pragma once

#include <moire.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace moire {

enum class Code : int32_t {
  kOk = MOIRE_OK,
  kInvalidArgument = MOIRE_INVALID_ARGUMENT,
  kUnsupported = MOIRE_UNSUPPORTED,
  kOutOfMemory = MOIRE_OUT_OF_MEMORY,
  kDevice = MOIRE_DEVICE,
  kIo = MOIRE_IO,
  kInternal = MOIRE_INTERNAL,
  kRankFailed = MOIRE_RANK_FAILED,
};

MOIRE_API std::string_view code_name(Code code);

// A code and, unless it is kOk, one sentence: the call, what was found and what was needed.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const& { return message_; }
  std::string message() && { return std::move(message_); }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace moire
