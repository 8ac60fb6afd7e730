// A build without CUDA: there is no GPU to benchmark.
#include <stdexcept>

#include "gpu.h"

namespace moire::tool {
namespace {

Status none() { return {Code::kUnsupported, "bench: this build has no CUDA backend"}; }

}  // namespace

struct Gpu::State {};
Gpu::Gpu(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gpu::~Gpu() = default;
Result<std::unique_ptr<Gpu>> Gpu::open(int) { return none(); }
void* Gpu::stream() const { return nullptr; }
std::string Gpu::bus_id() const { return {}; }
int64_t Gpu::cache_bytes() const { return 0; }
int64_t Gpu::free_bytes() const { return 0; }
Result<std::unique_ptr<Gpu::Graph>> Gpu::capture(const std::function<Status()>&) const {
  return none();
}
double Gpu::seconds(const Graph&, const Graph&) const {
  throw std::runtime_error(none().message());
}
void Gpu::launch(const Graph&) const { throw std::runtime_error(none().message()); }
void Gpu::flush() { throw std::runtime_error(none().message()); }
Gpu::Mark Gpu::mark() const { throw std::runtime_error(none().message()); }
void Gpu::wait(const Mark&) const { throw std::runtime_error(none().message()); }
double Gpu::seconds(const Mark&, const Mark&) const { throw std::runtime_error(none().message()); }
double Gpu::copy_bandwidth() const { throw std::runtime_error(none().message()); }
void* Gpu::take(int64_t) { throw std::runtime_error(none().message()); }
Status Gpu::copy(void*, const void*, int64_t) const { return none(); }

}  // namespace moire::tool
