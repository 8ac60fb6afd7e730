// Early return of a failed Status.
#pragma once

#include <moire/status.h>

#define MOIRE_RETURN_IF_ERROR(expression)                                  \
  do {                                                                     \
    if (::moire::Status moire_status = (expression); !moire_status.ok()) { \
      return moire_status;                                                 \
    }                                                                      \
  } while (false)
