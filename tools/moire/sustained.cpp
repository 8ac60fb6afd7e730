#include "sustained.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <utility>

namespace moire::tool {
namespace {

using Mark = TimedGpu::Mark;

struct Chunk {
  std::vector<std::pair<Mark, Mark>> calls;  // before and behind each
  const Mark& end() const { return calls.back().second; }
};

// One function's calls, enqueued in chunks.
class Queue {
 public:
  Queue(TimedGpu& gpu, const EnqueueCall& call) : gpu_(gpu), call_(call) {}

  Chunk enqueue(int64_t calls) {
    Chunk chunk;
    for (int64_t i = 0; i < calls; ++i) {
      gpu_.flush();
      Mark begin = gpu_.mark();
      call_(next_++);
      chunk.calls.emplace_back(std::move(begin), gpu_.mark());
    }
    return chunk;
  }
  // The second of two calls, with its flush.
  double seconds_of_an_iteration() {
    for (int i = 0; i < 2; ++i) call_(next_++);
    const Chunk first = enqueue(1), second = enqueue(1);
    gpu_.wait(second.end());
    return gpu_.seconds(first.end(), second.end());
  }

 private:
  TimedGpu& gpu_;
  const EnqueueCall& call_;
  int64_t next_ = 0;
};

template <class Value>
std::optional<double> mean(const std::vector<Stretch>& turns, Value value) {
  double sum = 0;
  for (const Stretch& turn : turns) {
    const std::optional<double> one = value(turn);
    if (!one.has_value()) return std::nullopt;
    sum += *one / static_cast<double>(turns.size());
  }
  return turns.empty() ? std::nullopt : std::optional(sum);
}

std::vector<double> rates(const Measured& m) {
  std::vector<double> out;
  for (const double seconds : m.turn_seconds()) out.push_back(m.flops / seconds);
  return out;
}

}  // namespace

std::optional<double> Stretch::millijoules() const {
  if (!power.watts.has_value()) return std::nullopt;
  return 1e3 * *power.watts * window_seconds / static_cast<double>(call_seconds.size());
}

Stretch stretch(TimedGpu& gpu, const EnqueueCall& call, const SustainedProtocol& protocol,
                Meter& meter) {
  Queue queue(gpu, call);
  const int64_t calls =
      std::max<int64_t>(1, std::llround(protocol.chunk_seconds / queue.seconds_of_an_iteration()));
  meter.start();
  const double started = gpu.now();
  std::deque<Chunk> chunks;
  chunks.push_back(queue.enqueue(calls));
  Stretch out;
  Mark begin;
  double timed_from = 0;
  while (out.window_seconds < protocol.timed_seconds) {
    chunks.push_back(queue.enqueue(calls));
    const Chunk done = std::move(chunks.front());
    chunks.pop_front();
    gpu.wait(done.end());
    if (begin != nullptr) {
      for (const auto& [before, behind] : done.calls) {
        out.call_seconds.push_back(gpu.seconds(before, behind));
      }
      out.window_seconds = gpu.seconds(begin, done.end());
    } else if (gpu.now() - started >= protocol.warm_seconds) {
      begin = done.end();
      timed_from = gpu.now();
    }
  }
  const double timed_to = gpu.now();
  gpu.wait(chunks.front().end());
  std::vector<PowerReading> readings = meter.stop();
  std::erase_if(readings, [&](const PowerReading& r) {
    return r.seconds < timed_from || r.seconds > timed_to;
  });
  out.power = mean_power(readings);
  return out;
}

std::vector<std::vector<Stretch>> take_turns(TimedGpu& gpu, const std::vector<EnqueueCall>& calls,
                                             const SustainedProtocol& protocol, Meter& meter,
                                             const std::function<void()>& tick) {
  std::vector<std::vector<Stretch>> out(calls.size());
  for (int turn = 0; turn < protocol.turns; ++turn) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const size_t which = turn % 2 == 0 ? i : calls.size() - 1 - i;
      out[which].push_back(stretch(gpu, calls[which], protocol, meter));
      tick();
    }
  }
  return out;
}

Summary Measured::seconds() const {
  std::vector<double> all;
  for (const Stretch& turn : turns) {
    all.insert(all.end(), turn.call_seconds.begin(), turn.call_seconds.end());
  }
  return summarize(std::move(all));
}

std::vector<double> Measured::turn_seconds() const {
  std::vector<double> out;
  for (const Stretch& turn : turns) out.push_back(summarize(turn.call_seconds).median);
  return out;
}

std::vector<double> Measured::turn_millijoules() const {
  std::vector<double> out;
  for (const Stretch& turn : turns) {
    const std::optional<double> one = turn.millijoules();
    if (!one.has_value() || !flush_millijoules.has_value()) return {};
    out.push_back(*one - *flush_millijoules);
  }
  return out;
}

std::optional<double> Measured::millijoules() const {
  const std::vector<double> all = turn_millijoules();
  if (all.empty()) return std::nullopt;
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

std::optional<double> Measured::watts() const {
  return mean(turns, [](const Stretch& turn) { return turn.power.watts; });
}

std::optional<double> Measured::sm_mhz() const {
  return mean(turns, [](const Stretch& turn) { return turn.power.sm_mhz; });
}

double Measured::flops_rate() const {
  const double median = seconds().median;
  return median > 0 ? flops / median : 0;
}

Summary time_ratio(const Measured& ours, const Measured& theirs) {
  return ratio_span(theirs.turn_seconds(), ours.turn_seconds());
}

Summary rate_ratio(const Measured& ours, const Measured& theirs) {
  return ratio_span(rates(ours), rates(theirs));
}

}  // namespace moire::tool
