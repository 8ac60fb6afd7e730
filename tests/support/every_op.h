// Every op of the C ABI, from the list of its promises (tests/capi/abi.inc).
#pragma once

#include <moire/tensor.h>

namespace moire::test {

// Calls f("grouped_gemm", Args<moire_grouped_gemm_args>()) and so on for each op.
template <class F>
void for_every_op(F&& f) {
#define OP(name) f(#name, Args<moire_##name##_args>());
#define OP_WITH_WORKSPACE(name) OP(name)
#include "tests/capi/abi.inc"
}

}  // namespace moire::test
