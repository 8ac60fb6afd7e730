#include "machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>
#include <vector>

#include "harness.h"

namespace moire::tool {

CopyBlocks::CopyBlocks(int64_t bytes)
    : memory(Memory::Backing::kPages),
      source(static_cast<char*>(memory.take("source", bytes))),
      target(static_cast<char*>(memory.take("target", bytes))) {
  std::memset(source, 1, static_cast<size_t>(bytes));
  std::memset(target, 2, static_cast<size_t>(bytes));
}

void team_copy(Team& team, const void* source, void* target, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  const int64_t share = (bytes / team.num_threads() + kPage) / kPage * kPage;
  team.run([&](int thread) {
    const int64_t begin = std::min(bytes, share * thread);
    const int64_t end = std::min(bytes, begin + share);
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin,
                static_cast<size_t>(end - begin));
  });
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return 1;
}

int64_t last_level_cache_bytes() {
  for (int level = 4; level >= 1; --level) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(level) +
                       "/size");
    int64_t size = 0;
    char unit = 'K';
    if (file >> size >> unit) return size * (unit == 'M' ? 1 << 20 : 1 << 10);
  }
  return 0;
}

int64_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  for (int64_t kib = 0; file >> key >> kib >> unit;) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return int64_t{1} << 30;
}

namespace {

// The fastest of a few copies of everything; the C library streams past the caches here.
double whole_copies(Team& team, const char* source, char* target, int64_t bytes) {
  constexpr int kRepeats = 5;
  double best = 1e30;
  for (int i = 0; i < kRepeats; ++i) {
    const double start = now();
    team_copy(team, source, target, bytes);
    best = std::min(best, now() - start);
  }
  return static_cast<double>(bytes) / best;
}

// The median rate of short steps, which other programs rarely interrupt, of each thread; summed.
double stepwise_copies(Team& team, const char* source, char* target, int64_t bytes) {
  constexpr int64_t kStep = 1 << 20;
  std::vector<double> rates(static_cast<size_t>(team.num_threads()));
  team.run([&](int thread) {
    std::vector<double> steps;
    for (int64_t at = thread * kStep; at + kStep <= bytes; at += kStep * team.num_threads()) {
      const double start = now();
      std::memcpy(target + at, source + at, kStep);
      steps.push_back(static_cast<double>(kStep) / (now() - start));
    }
    rates[static_cast<size_t>(thread)] = summarize(steps).median;
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

double measure_copy_bandwidth(Team& team) {
  const int64_t bytes = std::min(std::max<int64_t>(4 * last_level_cache_bytes(), 64 << 20),
                                 available_memory_bytes() / 8);
  const CopyBlocks blocks(bytes);
  const double whole = whole_copies(team, blocks.source, blocks.target, bytes);
  return 2.0 * std::max(whole, stepwise_copies(team, blocks.source, blocks.target, bytes));
}

CpuTimes read_cpu_times() {
  CpuTimes out;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  std::ifstream file("/proc/stat");
  std::string label;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  file >> label >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  out.busy = (user + nice + system + irq + softirq) / ticks;
  out.stolen = steal / ticks;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  out.own = seconds(usage.ru_utime) + seconds(usage.ru_stime);
  out.wall = now();
  return out;
}

}  // namespace moire::tool
