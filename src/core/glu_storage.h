// What z and act of grouped_gemm_glu are rounded to, stored or not.
#pragma once

#include <moire/grouped_gemm.h>

namespace moire {

inline DType glu_storage(const GroupedGemmGluArgs& args) {
  if (is_present(args.act)) return TensorView(args.act).type();
  if (is_present(args.z)) return TensorView(args.z).type();
  return args.storage == 0 ? DType::kBF16 : static_cast<DType>(args.storage);
}

}  // namespace moire
