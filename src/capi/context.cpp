// C entries: errors, devices, contexts, explanations.
#include "capi/boundary.h"

namespace moire::capi {

namespace {

// A message as it came, or one put together here.
struct LastError {
  std::string given;
  char made[160];
  const char* text = "";
};

LastError& last_error() {
  static thread_local LastError error;
  return error;
}

Status copy_text(std::string_view entry, const std::string& text, char* buffer, size_t bytes,
                 size_t* needed) {
  const size_t size = text.size() + 1, room = buffer == nullptr ? 0 : bytes;
  if (needed != nullptr) *needed = size;
  if (buffer == nullptr && needed != nullptr) return {};
  if (room < size) return invalid(entry, "the buffer has ", room, " bytes, needs ", size);
  std::memcpy(buffer, text.c_str(), size);
  return {};
}

}  // namespace

int32_t finish(Status status) noexcept {
  LastError& error = last_error();
  const Code code = status.code();
  error.given = std::move(status).message();
  error.text = error.given.c_str();
  return static_cast<int32_t>(code);
}

int32_t finish(Code code, std::string_view text, std::string_view what) noexcept {
  LastError& error = last_error();
  const size_t first = text.copy(error.made, sizeof(error.made) - 1);
  error.made[first + what.copy(error.made + first, sizeof(error.made) - 1 - first)] = 0;
  error.text = error.made;
  return static_cast<int32_t>(code);
}

}  // namespace moire::capi

using moire::Code;
using moire::invalid;
using moire::Status;
using moire::capi::guarded;

extern "C" {

int32_t moire_version_number(void) { return MOIRE_VERSION_NUMBER; }

const char* moire_code_name(int32_t code) {
  return moire::code_name(static_cast<Code>(code)).data();
}

const char* moire_last_error(void) { return moire::capi::last_error().text; }

const char* moire_build_info(void) {
  try {
    return moire::build_info().c_str();
  } catch (...) {
    return "{}";  // no memory for the text
  }
}

int32_t moire_device_count(int32_t device, int32_t* count) {
  return guarded([&]() -> Status {
    if (count == nullptr) return invalid("moire_device_count", "count is null");
    if (device != MOIRE_CPU && device != MOIRE_CUDA) {
      return invalid("moire_device_count", "device is ", device, ", must be 0 (cpu) or 1 (cuda)");
    }
    *count = moire::device_count(static_cast<moire::Device>(device));
    return {};
  });
}

int32_t moire_device_info(int32_t device, int32_t index, char* buffer, size_t bytes,
                          size_t* needed) {
  return guarded([&]() -> Status {
    const auto info = moire::device_info(static_cast<moire::Device>(device), index);
    if (!info.ok()) return info.status();
    return moire::capi::copy_text("moire_device_info", info.value(), buffer, bytes, needed);
  });
}

int32_t moire_context_create(const moire_context_options* given, moire_context** context) {
  return guarded([&]() -> Status {
    constexpr std::string_view kEntry = "moire_context_create";
    if (context == nullptr) return invalid(kEntry, "context is null");
    *context = nullptr;
    moire::Args<moire_context_options> read;
    MOIRE_RETURN_IF_ERROR(moire::capi::read_args(kEntry, given, &read, "options"));
    if (read.strict != 0 && read.strict != 1) {
      return invalid(kEntry, "strict is ", read.strict, ", must be 0 to 1");
    }
    moire::ContextOptions options;
    options.device = static_cast<moire::Device>(read.device);
    options.index = read.index;
    options.num_threads = read.num_threads;
    options.strict = read.strict != 0;
    if (read.implementation != nullptr) options.implementation = read.implementation;
    options.stream = read.stream;
    options.parallel = read.parallel;
    if (read.plan_for != nullptr) options.plan_for = read.plan_for;
    if (read.communicator != nullptr) options.communicator = read.communicator->value;
    auto created = read.sharing == nullptr ? moire::Context::create(options)
                                           : read.sharing->value.sharing(options);
    if (!created.ok()) return created.status();
    *context = new moire_context{std::move(created).value()};
    return {};
  });
}

int32_t moire_context_explaining(const moire_context* context, moire_context** explaining) {
  return guarded([&]() -> Status {
    if (context == nullptr || explaining == nullptr) {
      return invalid("moire_context_explaining", "context or explaining is null");
    }
    *explaining = new moire_context{context->value.explaining()};
    return {};
  });
}

int32_t moire_explanation(const moire_context* explaining, char* buffer, size_t bytes,
                          size_t* needed) {
  return guarded([&]() -> Status {
    if (explaining == nullptr || !explaining->value.is_explaining()) {
      return invalid("moire_explanation", "needs a context made by moire_context_explaining");
    }
    return moire::capi::copy_text("moire_explanation",
                                  moire::to_json(explaining->value.explanation()), buffer, bytes,
                                  needed);
  });
}

int32_t moire_context_check(const moire_context* context) {
  return guarded([&]() -> Status {
    if (context == nullptr) return invalid("moire_context_check", "context is null");
    return context->value.check();
  });
}

void moire_context_destroy(moire_context* context) { delete context; }

}  // extern "C"
