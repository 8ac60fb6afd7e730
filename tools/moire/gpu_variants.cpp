#include "gpu_variants.h"

#include <algorithm>
#include <stdexcept>

#include "bench_groups.h"
#include "bench_variants.h"
#include "case_runner.h"
#include "commands.h"
#include "statistics.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr int64_t kCachesSpanned = 3;
constexpr int64_t kMostSets = 256;
constexpr int64_t kMemoryShare = 3;  // of what is free

int64_t rotating_sets(const Gpu& gpu, int64_t set_bytes) {
  const int64_t bytes = std::max<int64_t>(1, set_bytes);
  const int64_t possible =
      std::clamp<int64_t>(gpu.free_bytes() / kMemoryShare / bytes, 1, kMostSets);
  return std::clamp<int64_t>(kCachesSpanned * gpu.cache_bytes() / bytes + 1, 1, possible);
}

void explain(const Context& context, BenchResult& r) {
  Operands shapes(r.problem, Operands::Content::kNone);
  for (const Call& call : make_case(shapes).calls) {
    const Plan planned = plan(context, call, shapes);
    require(planned.status);
    for (const Step& step : planned.steps) {
      r.bytes += static_cast<double>(step.bytes_read + step.bytes_written);
      r.implementation = step.implementation;
    }
    r.flops += call.flops;
  }
  r.set_bytes = shapes.bytes();
}

}  // namespace

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// One copy of an op's operands, on the device.
class DeviceSet {
 public:
  DeviceSet(const Context& context, const Problem& problem)
      : operands_(problem, Operands::Content::kNormal), what_(make_case(operands_)) {
    std::vector<Workspace> workspaces;
    for (const Call& call : what_.calls) {
      size_t bytes = 0;
      if (call.workspace != nullptr) require(call.workspace(context, &bytes));
      workspaces.push_back(operands_.workspace(bytes));
      call.stage(staged_, workspaces.back());
    }
    require(staged_.upload());
    for (size_t i = 0; i < what_.calls.size(); ++i) {
      calls_.push_back(what_.calls[i].on_device(staged_, workspaces[i]));
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
  // What a wrong row says; "" if what the first run left is right.
  std::string judge() {
    require(staged_.download());
    return judge_rows(operands_, what_);
  }
  int64_t bytes() const { return operands_.bytes(); }

 private:
  Operands operands_;
  Case what_;
  staging::StagedCall staged_;
  std::vector<std::function<Status(const Context&)>> calls_;
};

GraphVariant::GraphVariant(const Gpu& gpu, std::vector<std::function<Status()>> sets)
    : gpu_(gpu), sets_(std::move(sets)) {
  for (const auto& set : sets_) alone_.push_back(capture(set));
}

double GraphVariant::seconds(int64_t first, int64_t calls) {
  if (calls == 1) return gpu_.seconds(*graph_of(first + num_sets() - 1), *graph_of(first));
  const Gpu::Graph& graph = graph_of_many(calls);
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

std::unique_ptr<Gpu::Graph> GraphVariant::capture(const std::function<Status()>& enqueue) const {
  auto graph = gpu_.capture(enqueue);
  require(graph.status());
  return std::move(graph).value();
}

const Gpu::Graph& GraphVariant::graph_of_many(int64_t calls) {
  std::unique_ptr<Gpu::Graph>& graph = many_[calls];
  if (graph == nullptr) {
    graph = capture([&]() -> Status {
      for (int64_t i = 0; i < calls; ++i) {
        Status status = sets_[static_cast<size_t>(i % num_sets())]();
        if (!status.ok()) return status;
      }
      return {};
    });
  }
  return *graph;
}

OpOnGpu::~OpOnGpu() = default;

OpOnGpu::OpOnGpu(const Context& context, const Gpu& gpu, BenchResult& r) {
  explain(context, r);
  r.num_sets = rotating_sets(gpu, r.set_bytes);
  std::vector<std::function<Status()>> calls;
  for (int64_t i = 0; i < r.num_sets; ++i) {
    sets_.push_back(std::make_unique<DeviceSet>(context, r.problem));
    calls.emplace_back([&context, set = sets_.back().get()] { return set->enqueue(context); });
  }
  const std::string wrong = sets_[0]->judge();
  if (!wrong.empty()) {
    throw std::runtime_error(text("bench: the result of ", to_line(r.problem),
                                  " is wrong, so its time means nothing: ", wrong));
  }
  variant_ = std::make_unique<GraphVariant>(gpu, std::move(calls));
}

GpuBaseline::GpuBaseline(const CuBlas* blas, Gpu& gpu, const BenchResult& r) {
  std::vector<std::function<Status()>> calls;
  if (r.problem.op->multiplies()) {
    if (blas == nullptr || r.problem.quantization != Quantization::kNone) return;
    for (int64_t i = 0; i < r.num_sets; ++i) {
      products_.push_back(CuBlasBaseline::create(*blas, gpu, r.problem));
      if (products_.back() == nullptr) return;
      calls.emplace_back([set = products_.back().get()] { return set->enqueue(); });
    }
    name_ = text("cuBLAS, one call per group, ", dtype_name(r.problem.dtype));
  } else if (r.problem.op->moves_bytes && r.bytes >= 2) {
    const auto bytes = static_cast<int64_t>(r.bytes / 2);
    for (int64_t i = 0; i < rotating_sets(gpu, 2 * bytes); ++i) {
      void *from = gpu.take(bytes), *to = gpu.take(bytes);
      calls.emplace_back([&gpu, from, to, bytes] { return gpu.copy(to, from, bytes); });
    }
    name_ = "copy of as many bytes";
  }
  if (!calls.empty()) variant_ = std::make_unique<GraphVariant>(gpu, std::move(calls));
}

void check_smaller(const Context& on_host, BenchResult& r) {
  const Verdict verdict = judge(on_host, smaller(r.problem));
  if (verdict.kind == Verdict::Kind::kFailed) {
    throw std::runtime_error(
        text("bench: the result is wrong, so its time means nothing; moire check --device cuda \"",
             to_line(smaller(r.problem)), "\" says how"));
  }
  r.max_error = verdict.max_error();
  r.unsupported = verdict.reason;
}

MachineFacts measure_gpu(int index) {
  const std::unique_ptr<Gpu> gpu = usage(Gpu::open(index));
  const std::unique_ptr<CuBlas> blas = CuBlas::open(*gpu);
  MachineFacts m;
  m.is_gpu = true;
  m.name = nlohmann::json::parse(usage(device_info(Device::kCuda, index))).value("name", "");
  m.cache_bytes = gpu->cache_bytes();
  m.bandwidth = gpu->copy_bandwidth();
  if (blas == nullptr) {
    m.no_baseline = "libcublas could not be loaded";
  } else {
    m.peak_flops = blas->dense_rate(*gpu, DType::kBF16);
  }
  return m;
}

}  // namespace moire::tool
