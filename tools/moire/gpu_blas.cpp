#include "gpu_blas.h"

#include <dlfcn.h>

#include <algorithm>

#include "commands.h"
#include "operands.h"
#include "staging/device_memory.h"
#include "text.h"

namespace moire::tool {
namespace {

// Of cublas_api.h and library_types.h.
constexpr int kNoTranspose = 0, kTranspose = 1;
constexpr int kReal32 = 0, kReal16 = 2, kReal16Brain = 14;
constexpr int kCompute32 = 68;
constexpr int kDefaultAlgorithm = -1;

// Normal numbers, over and over.
char* take_normal(Gpu& gpu, DType dtype, int64_t elements) {
  constexpr int64_t kPeriod = 65521;
  const int64_t size = dtype_size(dtype), count = std::min(elements, kPeriod);
  auto* const memory = static_cast<char*>(gpu.take(elements * size));
  std::vector<std::byte> numbers(static_cast<size_t>(count * size));
  fill_normal({numbers.data(), dtype, {count}}, 1);
  Status status =
      staging::copy_to_device(reinterpret_cast<std::byte*>(memory), numbers.data(), numbers.size());
  for (int64_t at = count; status.ok() && at < elements; at += std::min(at, elements - at)) {
    status = gpu.copy(memory + at * size, memory, std::min(at, elements - at) * size);
  }
  require(status);
  return memory;
}

int type_of(DType dtype) {
  return dtype == DType::kBF16 ? kReal16Brain : dtype == DType::kFP16 ? kReal16 : kReal32;
}

}  // namespace

std::unique_ptr<CuBlas> CuBlas::open(const Gpu& gpu) {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) return nullptr;
  auto blas = std::make_unique<CuBlas>();
  blas->library_ = {library, dlclose};
  const auto create = reinterpret_cast<int (*)(Handle*)>(dlsym(library, "cublasCreate_v2"));
  const auto destroy = reinterpret_cast<int (*)(Handle)>(dlsym(library, "cublasDestroy_v2"));
  const auto set_stream =
      reinterpret_cast<int (*)(Handle, void*)>(dlsym(library, "cublasSetStream_v2"));
  blas->gemm_ = reinterpret_cast<GemmEx>(dlsym(library, "cublasGemmEx"));
  const bool has_all = create && destroy && set_stream && blas->gemm_;
  Handle handle = nullptr;
  if (!has_all || create(&handle) != 0) return nullptr;
  blas->handle_ = {handle, destroy};
  if (set_stream(handle, gpu.stream()) != 0) return nullptr;
  return blas;
}

// cuBLAS is column-major: it gets the operands in the other order.
std::function<Status()> CuBlas::multiplies(DType dtype, std::vector<Product> products) const {
  return [this, type = type_of(dtype), products = std::move(products)]() -> Status {
    const float one = 1, zero = 0;
    const auto int_of = [](int64_t size) { return static_cast<int>(size); };
    for (const Product& p : products) {
      const int status =
          gemm_(handle_.get(), p.transpose_b ? kTranspose : kNoTranspose,
                p.transpose_a ? kTranspose : kNoTranspose, int_of(p.n), int_of(p.m), int_of(p.k),
                &one, p.b, type, int_of(p.columns_b()), p.a, type, int_of(p.columns_a()), &zero,
                p.c, type, int_of(p.n), kCompute32, kDefaultAlgorithm);
      if (status != 0) return {Code::kDevice, text("bench: cublasGemmEx returned ", status)};
    }
    return {};
  };
}

std::function<Status()> CuBlas::products(Gpu& gpu, const Problem& problem) const {
  std::vector<Product> products =
      products_of(problem, dtype_size(problem.dtype),
                  [&](int64_t elements) { return take_normal(gpu, problem.dtype, elements); });
  if (products.empty()) return nullptr;
  return multiplies(problem.dtype, std::move(products));
}

std::function<Status()> CuBlas::dense(Gpu& gpu) const {
  constexpr int64_t kSize = 8192;
  constexpr DType dtype = DType::kBF16;
  const void* const a = take_normal(gpu, dtype, kSize * kSize);
  const void* const b = take_normal(gpu, dtype, kSize * kSize);
  void* const c = gpu.take(kSize * kSize * dtype_size(dtype));
  return multiplies(dtype, {{false, true, kSize, kSize, kSize, a, b, c}});
}

}  // namespace moire::tool
