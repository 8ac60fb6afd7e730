// The ordered list of implementations of each op, fastest first: of the grouped GEMMs, and of every
// other op. A new backend is one more entry of both.
#include <moire/explain.h>
#include <moire/ops.h>

#include <vector>

#include "backend/cpu/implementations.h"
#include "backend/implementation.h"

#if MOIRE_HAS_CUDA
#include "backend/cuda/implementations.h"
#define MOIRE_CUDA(...) __VA_ARGS__,
#else
#define MOIRE_CUDA(...)
#endif

namespace moire {

#define MOIRE_LIST(Name, ...)                                       \
  template <>                                                       \
  std::span<const Implementation<Name##Args>> implementations() {   \
    static const Implementation<Name##Args> list[] = {__VA_ARGS__}; \
    return list;                                                    \
  }
#define MOIRE_OP(Name) MOIRE_LIST(Name, MOIRE_CUDA(cuda::ops::k##Name) cpu::k##Name)
#define MOIRE_GEMM(Name)                                                                        \
  MOIRE_LIST(Name, MOIRE_CUDA(cuda::sm90::with_fp8::k##Name, cuda::portable::with_fp8::k##Name) \
                       cpu::k##Name)

MOIRE_FOR_EACH_GEMM(MOIRE_GEMM)
MOIRE_FOR_EACH_OTHER_OP(MOIRE_OP)

WeightForm prepared_form(const DeviceState& state, const PrepareWeightArgs& args) {
#if MOIRE_HAS_CUDA
  if (state.device == Device::kCuda) return cuda::ops::prepared_form(state, args);
#endif
  return cpu::prepared_form(state, args);
}

std::vector<AvailableImplementation> available_implementations() {
  std::vector<AvailableImplementation> out;
  const auto append = [&](std::string_view op, auto list) {
    for (const auto& i : list) {
      out.push_back({std::string(op), std::string(device_name(i.device)), std::string(i.name)});
    }
  };
#define MOIRE_APPEND(name) append(#name, implementations<Args<moire_##name##_args>>());
  MOIRE_FOR_EACH_IMPLEMENTED_OP(MOIRE_APPEND, MOIRE_APPEND)
#undef MOIRE_APPEND
  return out;
}

}  // namespace moire
