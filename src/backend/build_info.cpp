// What this library was built with.
#include <moire/context.h>

#include "core/format.h"

namespace moire {

const std::string& build_info() {
  static const std::string json = concat("{\"version\": ", json_quote(MOIRE_VERSION_STRING),
                                         ", \"compiler\": ", json_quote(MOIRE_COMPILER),
                                         ", \"build_type\": ", json_quote(MOIRE_BUILD_TYPE),
                                         ", \"cuda\": ", json_quote(MOIRE_CUDA_BUILD), "}");
  return json;
}

}  // namespace moire
