// Every op of the C ABI, from the list of its promises (tests/capi/abi.inc).
#pragma once

#include <moire/tensor.h>

namespace moire::test {

// Calls f("grouped_gemm", Args<moire_grouped_gemm_args>()) and so on for each op.
template <class F>
void for_every_op(F&& f) {
#define STRUCT(name, size)
#define FIELD(name, field, offset)
#define ENUMERATOR(name, value)
#define OP(name) f(#name, Args<moire_##name##_args>());
#define OP_WITH_WORKSPACE(name) OP(name)
#define ENTRY(name)
#define CPP(name)
#include "tests/capi/abi.inc"
#undef STRUCT
#undef FIELD
#undef ENUMERATOR
#undef OP
#undef OP_WITH_WORKSPACE
#undef ENTRY
#undef CPP
}

}  // namespace moire::test
