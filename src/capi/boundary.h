// What every C entry does: catch, copy the caller's (possibly older, shorter) struct, call the C++
// function, keep its message.
#pragma once

#include <moire.h>
#include <moire/context.h>
#include <moire/tensor.h>

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string_view>

#include "core/status_macros.h"

struct moire_context {
  moire::Context value;
};
struct moire_communicator {
  std::shared_ptr<moire::Communicator> value;
};

namespace moire::capi {

// Both keep this thread's last message (moire_last_error) and return the code. They take nothing
// from the heap: there may be nothing left. `what` is cut where it is long.
int32_t finish(Status status) noexcept;
int32_t finish(Code code, std::string_view text, std::string_view what = {}) noexcept;

int32_t guarded(auto&& f) noexcept {
  try {
    return finish(f());
  } catch (const std::bad_alloc&) {
    return finish(Code::kOutOfMemory, "out of host memory");
  } catch (const std::exception& e) {
    return finish(Code::kInternal, "unexpected exception: ", e.what());
  } catch (...) {
    return finish(Code::kInternal, "unexpected exception");
  }
}

// The caller's struct, up to the size it says it has; fields it does not know keep their default,
// zero.
template <class C>
Status read_args(std::string_view entry, const C* given, Args<C>* out,
                 std::string_view name = "args") {
  if (given == nullptr) return invalid(entry, name, " is null");
  if (given->struct_size < sizeof(size_t) || given->struct_size > sizeof(C) ||
      given->struct_size % alignof(C) != 0) {
    return invalid(entry, "struct_size is ", given->struct_size,
                   ", must be set to sizeof(the struct), at most ", sizeof(C), " in this library");
  }
  std::memcpy(static_cast<C*>(out), given, given->struct_size);
  out->struct_size = sizeof(C);
  return {};
}

template <class C, class Op>
int32_t call(std::string_view entry, const moire_context* context, const C* given,
             Op&& op) noexcept {
  return guarded([&]() -> Status {
    if (context == nullptr) return invalid(entry, "context is null");
    Args<C> args;
    MOIRE_RETURN_IF_ERROR(read_args(entry, given, &args));
    return op(context->value, args);
  });
}

template <class C, class Op>
int32_t call_workspace(std::string_view entry, const moire_context* context, const C* given,
                       size_t* bytes, Op&& op) noexcept {
  return call(entry, context, given, [&](const Context& c, const Args<C>& args) -> Status {
    if (bytes == nullptr) return invalid(entry, "bytes is null");
    return op(c, args, bytes);
  });
}

}  // namespace moire::capi
