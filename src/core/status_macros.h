// Statuses in short: the early return of a failed one, and that of a wrong argument.
#pragma once

#include <moire/status.h>

#include <string_view>

#include "core/format.h"

#define MOIRE_RETURN_IF_ERROR(expression)                                  \
  do {                                                                     \
    if (::moire::Status moire_status = (expression); !moire_status.ok()) { \
      return moire_status;                                                 \
    }                                                                      \
  } while (false)

namespace moire {

template <class... Parts>
Status invalid(std::string_view call, const Parts&... message) {
  return {Code::kInvalidArgument, concat(call, ": ", message...)};
}

}  // namespace moire
