#include "gpu_bench.h"

#include <algorithm>
#include <cmath>

#include "case_runner.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kMemoryShare = 3;  // of what is free
constexpr double kNotableClock = 0.03;

// One copy of an op's operands, on the device.
class DeviceSet {
 public:
  DeviceSet(const Context& context, const Problem& problem, const std::vector<size_t>& workspaces)
      : what_(problem, Operands::Content::kNormal) {
    std::vector<Workspace> taken;
    for (size_t i = 0; i < workspaces.size(); ++i) {
      size_t bytes = 0;  // as planned; who asks has the weights prepared
      require(what_.calls[i].workspace(context, &bytes));
      taken.push_back(what_.operands.workspace(workspaces[i]));
      what_.calls[i].stage(staged_, taken[i]);
    }
    require(staged_.upload());
    for (size_t i = 0; i < taken.size(); ++i) {
      calls_.push_back(what_.calls[i].on_device(staged_, taken[i]));
    }
    require(enqueue(context));
    require(context.check());
  }

  Status enqueue(const Context& context) const {
    for (const auto& call : calls_) {
      Status status = call(context);
      if (!status.ok()) return status;
    }
    return {};
  }
  // Throws where what the first run left is wrong.
  void judge() {
    require(staged_.download());
    require_right_rows(Device::kCuda, what_.operands, what_.calls);
  }

 private:
  Case what_;
  staging::StagedCall staged_;
  std::vector<std::function<Status(const Context&)>> calls_;
};

// Bytes read and written per second by a copy much larger than the cache.
double copy_bandwidth(Gpu& gpu) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  constexpr double kSeconds = 0.5;  // a GPU that comes from idle takes that long to full clocks
  void *from = gpu.take(kBytes), *to = gpu.take(kBytes);
  GraphVariant copy(gpu, "copy", {[&] { return gpu.copy(to, from, kBytes); }});
  double least = 1e30;
  for (double spent = 0; spent < kSeconds;) {
    const double t = copy.seconds(0, 1);
    least = std::min(least, t);
    spent += t;
  }
  return 2.0 * static_cast<double>(kBytes) / least;
}

std::optional<Variant> timed(const std::shared_ptr<GraphVariant>& graphs) {
  if (graphs == nullptr) return std::nullopt;
  return Variant{graphs->name(), nullptr,
                 [graphs](int64_t first, int64_t calls) { return graphs->seconds(first, calls); }};
}

}  // namespace

GraphVariant::GraphVariant(Gpu& gpu, std::string name, std::vector<std::function<Status()>> sets)
    : gpu_(gpu), name_(std::move(name)), sets_(std::move(sets)) {
  for (const auto& set : sets_) alone_.push_back(gpu_.capture(set));
}

double GraphVariant::seconds(int64_t first, int64_t calls) {
  if (calls == 1) return gpu_.seconds(graph_of(first + num_sets() - 1), graph_of(first));
  Gpu::Graph& graph = many_[calls];
  if (graph.executable == nullptr) {
    graph = gpu_.capture([&]() -> Status {
      for (int64_t i = 0; i < calls; ++i) {
        Status status = sets_[static_cast<size_t>(i % num_sets())]();
        if (!status.ok()) return status;
      }
      return {};
    });
  }
  return gpu_.seconds(graph, graph);
}

double GraphVariant::host_seconds() const {
  constexpr int64_t kCalls = 10;
  std::vector<double> times;
  for (int64_t i = 0; i < kCalls; ++i) {
    const double start = now();
    require(sets_[static_cast<size_t>(i % num_sets())]());
    times.push_back(now() - start);
  }
  gpu_.wait(gpu_.mark());
  return summarize(std::move(times)).median;
}

GpuBench::GpuBench(const Context& on_host, Facts facts) : on_host_(on_host), context_(on_host) {
  machine_.is_gpu = true;
  open();
  machine_.cache_bytes = gpu_->cache_bytes();
  if (facts == Facts::kNone) return;
  const int index = on_host_.options().index;
  machine_.name = nlohmann::json::parse(usage(device_info(Device::kCuda, index))).value("name", "");
  machine_.bandwidth = copy_bandwidth(*gpu_);
  if (blas_ == nullptr) {
    machine_.no_baseline = "libcublas could not be loaded";
  } else {
    constexpr int64_t kRuns = 30;
    const auto dense = dense_graphs();
    std::vector<double> times;
    for (int64_t i = 0; i < kRuns; ++i) times.push_back(dense->seconds(i, 1));
    machine_.peak_flops = CuBlas::kDenseFlops / summarize(std::move(times)).median;
  }
}

void GpuBench::open() {
  context_ = on_host_;
  blas_.reset();
  gpu_.reset();
  gpu_ = Gpu::open(on_host_.options().index);
  blas_ = CuBlas::open(*gpu_);
  ContextOptions options = on_host_.options();
  options.stream = gpu_->stream();
  context_ = usage(on_host_.sharing(options));
}

int64_t GpuBench::sets_of(int64_t bytes) const {
  return rotating_sets(gpu_->cache_bytes(), gpu_->free_bytes() / kMemoryShare, bytes);
}

std::shared_ptr<GraphVariant> GpuBench::op_graphs(BenchResult& r) {
  open();
  const std::vector<size_t> workspaces = prepare(on_host_, r);
  if (!r.unsupported.empty()) return nullptr;
  for (const size_t size : workspaces) r.set_bytes += static_cast<int64_t>(size);
  r.num_sets = sets_of(r.set_bytes);
  std::vector<std::function<Status()>> calls;
  for (int64_t i = 0; i < r.num_sets; ++i) {
    const auto set = std::make_shared<DeviceSet>(context_, r.problem, workspaces);
    if (i == 0) set->judge();
    calls.emplace_back([this, set] { return set->enqueue(context_); });
  }
  return std::make_shared<GraphVariant>(*gpu_, "moire", std::move(calls));
}

std::shared_ptr<GraphVariant> GpuBench::baseline_graphs(const BenchResult& r) {
  std::string name = "copy of as many bytes";
  std::vector<std::function<Status()>> calls;
  if (r.problem.op->multiplies()) {
    if (blas_ == nullptr || r.problem.is_quantized()) return nullptr;
    name = text("cuBLAS, one call per group, ", dtype_name(r.problem.dtype));
    for (int64_t i = 0; i < r.num_sets; ++i) {
      calls.push_back(blas_->products(*gpu_, r.problem));
      if (calls.back() == nullptr) return nullptr;
    }
  } else if (r.problem.op->moves_bytes() && r.bytes >= 2) {
    const auto bytes = static_cast<int64_t>(r.bytes / 2);
    for (int64_t i = sets_of(2 * bytes); i > 0; --i) {
      void *from = gpu_->take(bytes), *to = gpu_->take(bytes);
      calls.emplace_back([this, from, to, bytes] { return gpu_->copy(to, from, bytes); });
    }
  }
  if (calls.empty()) return nullptr;
  return std::make_shared<GraphVariant>(*gpu_, std::move(name), std::move(calls));
}

std::shared_ptr<GraphVariant> GpuBench::dense_graphs() {
  if (blas_ == nullptr) return nullptr;
  return std::make_shared<GraphVariant>(*gpu_, "dense", std::vector{blas_->dense(*gpu_)});
}

std::optional<Variant> GpuBench::op(BenchResult& r) { return timed(op_graphs(r)); }

std::optional<Variant> GpuBench::baseline(const BenchResult& r) {
  return timed(baseline_graphs(r));
}

GpuConditions GpuBench::conditions() const {
  const auto nvml = Nvml::open(gpu_->bus_id());
  return nvml.ok() ? nvml.value().conditions() : GpuConditions{};
}

void GpuBench::end(const std::vector<BenchResult*>& timed) {
  const GpuConditions after = conditions();
  require(context_.check());
  const bool is_known = before_.sm_clock != 0 && after.sm_clock != 0;
  const bool has_moved =
      is_known && std::fabs(after.sm_clock / before_.sm_clock - 1) >= kNotableClock;
  for (BenchResult* r : timed) {
    r->before = before_;
    r->after = after;
    if (!has_moved) continue;
    r->warnings.push_back({&kClockMoved, text("the SM clock went from ", before_.sm_clock, " to ",
                                              after.sm_clock, " MHz at ", after.power, " W")});
  }
}

std::unique_ptr<Bench> make_gpu_bench(const Context& context) {
  return std::make_unique<GpuBench>(context, GpuBench::Facts::kMeasured);
}

}  // namespace moire::tool
