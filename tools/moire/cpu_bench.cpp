// A CPU as a benchmark sees it: rotating operands in its memory, beside OpenBLAS or a plain copy.
#include <cmath>
#include <cstdlib>

#include "baseline.h"
#include "bench.h"
#include "case_runner.h"
#include "machine.h"
#include "text.h"

namespace moire::tool {
namespace {

constexpr double kNotableShare = 0.05;  // of the cores' time
constexpr double kNotableClock = 0.03;
constexpr int64_t kMemoryShare = 4;  // of what is available, one part per variant

int64_t sets_of(int64_t bytes) {
  return rotating_sets(last_level_cache_bytes(), available_memory_bytes() / kMemoryShare, bytes);
}

// The GEMMs of an op, on FP32 operands of their own.
struct Gemms {
  explicit Gemms(const Problem& problem)
      : memory(Memory::Backing::kPages),
        products(products_of(problem, 4, [this](int64_t elements) { return normal(elements); })) {}
  void run() const {
    for (const Product& p : products) openblas_multiply(p);
  }
  char* normal(int64_t elements) {
    void* const data = memory.take("baseline", elements * 4);
    fill_normal({data, DType::kFP32, {elements}}, static_cast<uint64_t>(memory.bytes()));
    return static_cast<char*>(data);
  }

  Memory memory;
  std::vector<Product> products;
};

class CpuBench : public Bench {
 public:
  explicit CpuBench(const Context& context)
      : context_(context), team_(context.options().num_threads) {
    set_openblas_threads(team_.num_threads());
    const Result<std::string> info = device_info(context.device(), context.options().index);
    machine_.name = info.ok() ? nlohmann::json::parse(info.value()).value("name", "") : "";
    machine_.threads = team_.num_threads();
    machine_.cache_bytes = last_level_cache_bytes();
    double loads[1] = {0};
    if (getloadavg(loads, 1) == 1) machine_.load_average = loads[0];
    machine_.peak_flops = measure_peak_flops(team_);
    machine_.bandwidth = measure_copy_bandwidth(team_);
    if (openblas_name().empty()) machine_.no_baseline = "this build has no OpenBLAS";
  }

  std::optional<Variant> op(BenchResult& r) override {
    const std::vector<size_t> sizes = prepare(context_, r);
    if (!r.unsupported.empty()) return std::nullopt;
    std::vector<std::shared_ptr<Case>> sets;
    const bool is_of_ranks = r.problem.op->is_of_ranks();  // in windows larger than caches
    for (int64_t i = is_of_ranks ? 1 : sets_of(r.set_bytes); i > 0; --i) {
      sets.push_back(std::make_shared<Case>(r.problem, Operands::Content::kNormal));
    }
    std::vector<Workspace> workspaces;  // which the sets share
    workspaces.reserve(sizes.size());
    for (const size_t size : sizes) workspaces.push_back(sets[0]->operands.workspace(size));
    r.num_sets = static_cast<int64_t>(sets.size());
    r.set_bytes = std::max(r.set_bytes, sets[0]->operands.bytes());  // which are without windows
    if (is_of_ranks) r.bytes = 0;  // the first rank's, with rows that are nobody's
    for (const Call& call : sets[0]->calls) r.bytes += call.moved_bytes;
    const auto run = [this, sets, workspaces](int64_t call) {
      const Case& set = *sets[static_cast<size_t>(call) % sets.size()];
      for (size_t i = 0; i < workspaces.size(); ++i) {
        require(set.calls[i].run(context_, workspaces[i]));
      }
    };
    for (int64_t i = 0; i < r.num_sets; ++i) run(i);
    require_right_rows(Device::kCpu, sets[0]->operands, sets[0]->calls);
    return Variant{"", run};
  }

  std::optional<Variant> baseline(const BenchResult& r) override {
    if (r.problem.op->multiplies()) {
      if (openblas_name().empty()) return std::nullopt;
      std::vector<std::shared_ptr<Gemms>> sets = {std::make_shared<Gemms>(r.problem)};
      if (sets[0]->products.empty()) return std::nullopt;
      for (int64_t i = sets_of(sets[0]->memory.bytes()); i > 1; --i) {
        sets.push_back(std::make_shared<Gemms>(r.problem));
      }
      for (const auto& set : sets) set->run();
      return Variant{text(openblas_name(), ", sgemm per group"), [sets](int64_t call) {
                       sets[static_cast<size_t>(call) % sets.size()]->run();
                     }};
    }
    if (!r.problem.op->moves_bytes() || r.bytes < 2) return std::nullopt;
    const auto bytes = static_cast<int64_t>(r.bytes / 2);
    const int64_t sets = sets_of(2 * bytes);
    const auto blocks = std::make_shared<CopyBlocks>(bytes * sets);
    return Variant{"copy of as many bytes", [this, bytes, sets, blocks](int64_t call) {
                     const int64_t at = call % sets * bytes;
                     team_copy(team_, blocks->source + at, blocks->target + at, bytes);
                   }};
  }

  void begin() override { before_ = read_cpu_times(); }

  void end(const std::vector<BenchResult*>& timed) override {
    const CpuTimes after = read_cpu_times();
    const double capacity = (after.wall - before_.wall) * available_cores();
    const double others = (after.busy - before_.busy) - (after.own - before_.own);
    const double stolen = after.stolen - before_.stolen;
    const double moved = std::fabs(measure_peak_flops(team_) / machine_.peak_flops - 1);
    const auto warn = [&](bool is_notable, const WarningKind& kind, const char* what, double share,
                          const char* of_what) {
      if (!is_notable) return;
      const std::string seen = text(what, std::lround(100 * share), " % ", of_what);
      for (BenchResult* r : timed) r->warnings.push_back({&kind, seen});
    };
    warn(others > kNotableShare * capacity, kOtherLoad, "other programs took ", others / capacity,
         "of the cores' time");
    warn(stolen > kNotableShare * capacity, kStolenTime, "the hypervisor took ", stolen / capacity,
         "of the cores' time");
    warn(moved >= kNotableClock, kClockMoved, "the multiply-add rate is ", moved,
         "from where it was at the start");
  }

 private:
  Context context_;
  Team team_;
  CpuTimes before_;
};

}  // namespace

std::unique_ptr<Bench> make_cpu_bench(const Context& context) {
  return std::make_unique<CpuBench>(context);
}

}  // namespace moire::tool
