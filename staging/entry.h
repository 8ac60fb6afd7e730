// Entry: the library's functions for an argument struct, so that whoever sizes, runs and judges
// calls says it once for every op.
#pragma once

#include <moire/context.h>
#include <moire/expert_parallel.h>
#include <moire/glu.h>
#include <moire/grouped_gemm.h>
#include <moire/grouped_mlp.h>
#include <moire/ops.h>
#include <moire/quantize.h>
#include <moire/routing.h>

#include <cstddef>

namespace moire::staging {

template <class A>
struct Entry;
#define MOIRE_ENTRY_OF(name, workspace, has_workspace)                                        \
  template <>                                                                                 \
  struct Entry<Args<moire_##name##_args>> {                                                   \
    static constexpr Status (*kRun)(const Context&, const Args<moire_##name##_args>&) = name; \
    /* Else null, which under UBSan is compared at run time alone. */                         \
    static constexpr bool kHasWorkspace = has_workspace;                                      \
    static constexpr Status (*kWorkspace)(const Context&, const Args<moire_##name##_args>&,   \
                                          size_t*) = workspace;                               \
  };
#define MOIRE_ENTRY(name) MOIRE_ENTRY_OF(name, nullptr, false)
#define MOIRE_ENTRY_WITH_WORKSPACE(name) MOIRE_ENTRY_OF(name, name##_workspace, true)
MOIRE_FOR_EACH_OP(MOIRE_ENTRY, MOIRE_ENTRY_WITH_WORKSPACE)
#undef MOIRE_ENTRY_WITH_WORKSPACE
#undef MOIRE_ENTRY
#undef MOIRE_ENTRY_OF

}  // namespace moire::staging
