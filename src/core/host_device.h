// MOIRE_HOST_DEVICE marks functions that CUDA code calls as well.
#pragma once

#if defined(__CUDACC__)
#define MOIRE_HOST_DEVICE __host__ __device__
#else
#define MOIRE_HOST_DEVICE
#endif
