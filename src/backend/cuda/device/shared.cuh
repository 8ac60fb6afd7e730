// Dynamic shared memory under one name.
#pragma once

namespace moire::cuda {

template <class T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

}  // namespace moire::cuda
