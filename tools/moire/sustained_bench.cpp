#include "sustained_bench.h"

#include <algorithm>
#include <cstdio>

#include "gpu_bench.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

std::string fixed(const std::optional<double>& value, int digits) {
  return value.has_value() ? printed("%.*f", digits, *value) : "-";
}

std::string span_text(const Summary& span) {
  return text(fixed(span.median, 3), " [", fixed(span.least, 3), " ", fixed(span.most, 3), "]");
}

Json optional(const std::optional<double>& value) {
  return value.has_value() ? Json(*value) : Json(nullptr);
}

Json to_json(const Summary& span) {
  return {{"median", span.median}, {"least", span.least}, {"most", span.most}};
}

Json turns_json(const Measured& m) {
  const std::vector<double> seconds = m.turn_seconds(), millijoules = m.turn_millijoules();
  Json out = Json::array();
  for (size_t i = 0; i < m.turns.size(); ++i) {
    const Stretch& turn = m.turns[i];
    out.push_back({{"ms", 1e3 * seconds[i]},
                   {"calls", turn.call_seconds.size()},
                   {"window_seconds", turn.window_seconds},
                   {"watts", optional(turn.power.watts)},
                   {"sm_mhz", optional(turn.power.sm_mhz)},
                   {"mj", millijoules.empty() ? Json(nullptr) : Json(millijoules[i])}});
  }
  return out;
}

Json to_json(const Measured& m) {
  const Summary seconds = m.seconds();
  const char* const source = m.turns.empty() ? nullptr : m.turns[0].power.source;
  return {
      {"ms",
       {{"median", 1e3 * seconds.median}, {"p10", 1e3 * seconds.p10}, {"p90", 1e3 * seconds.p90}}},
      {"tflops", m.flops_rate() / 1e12},
      {"sm_mhz", optional(m.sm_mhz())},
      {"watts", optional(m.watts())},
      {"mj", optional(m.millijoules())},
      {"flush_mj", optional(m.flush_millijoules)},  // was subtracted
      {"energy", source == nullptr ? Json(nullptr) : Json(source)},
      {"host_us", 1e6 * m.host_seconds},
      {"turns", turns_json(m)}};
}

// Ops of no FLOP have no rate.
std::vector<std::string> table_row(const SustainedResult& r, const Measured& m) {
  const std::optional<double> mj = m.millijoules();
  const bool has_flops = m.flops > 0, is_ours = m.name == "moire", is_dense = m.name == "dense";
  const bool has_share = has_flops && !is_dense && r.peers.back().name == "dense";
  return {r.facts.problem.name,
          std::string(r.facts.problem.op->name),
          m.name,
          fixed(1e3 * m.seconds().median, 3),
          has_flops ? fixed(m.flops_rate() / 1e12, 0) : "-",
          fixed(m.sm_mhz(), 0),
          fixed(m.watts(), 0),
          fixed(mj, 1),
          mj.has_value() && has_flops ? fixed(1e9 * *mj / m.flops, 3) : "-",
          fixed(1e6 * m.host_seconds, 0),
          is_ours || is_dense ? "" : span_text(time_ratio(r.peers[0], m)),
          has_share ? span_text(rate_ratio(m, r.peers.back())) : ""};
}

constexpr int kVariants = 3;              // the op, its baseline, the dense product
constexpr double kSecondsPerProblem = 8;  // to make operands, and to check

SustainedResult run_problem(GpuBench& bench, const Problem& problem,
                            const SustainedProtocol& protocol, Meter& meter,
                            const std::function<void()>& tick) {
  SustainedResult out;
  out.facts.problem = problem;
  const auto op = bench.op_graphs(out.facts);
  if (op == nullptr) return out;
  const auto baseline = bench.baseline_graphs(out.facts);
  const auto dense = bench.dense_graphs();
  std::vector<EnqueueCall> calls;
  const auto add = [&](double flops, const GraphVariant* variant) {
    if (variant == nullptr) return;
    out.peers.push_back({variant->name(), flops, {}, {}, variant->host_seconds()});
    calls.emplace_back([variant](int64_t call) { variant->launch(call); });
  };
  add(out.facts.flops, op.get());
  add(out.facts.flops, baseline.get());
  add(CuBlas::kDenseFlops, dense.get());
  Gpu& gpu = bench.gpu();
  const Stretch flush = stretch(
      gpu, [](int64_t) {}, protocol, meter);
  tick();
  auto turns = take_turns(gpu, calls, protocol, meter, tick);
  require(bench.context().check());
  for (size_t i = 0; i < turns.size(); ++i) {
    out.peers[i].turns = std::move(turns[i]);
    out.peers[i].flush_millijoules = flush.millijoules();
  }
  return out;
}

}  // namespace

std::string sustained_plan(const SustainedProtocol& p, int64_t num_stretches,
                           double setup_seconds) {
  const double timed = p.stretch_seconds() * static_cast<double>(num_stretches);
  return text("plan: ", num_stretches, " stretches of ", fixed(p.stretch_seconds(), 1),
              " s = ", fixed(timed, 0), " s, and some ", fixed(setup_seconds, 0),
              " s to make operands and check: ", fixed(timed + setup_seconds, 0), " s\n");
}

std::string sustained_table(const std::vector<SustainedResult>& results) {
  Table table({"problem", "op", "peer", ">ms", ">TFLOP/s", ">MHz", ">W", ">mJ", ">pJ/FLOP",
               ">host us", ">moire /", ">of dense"});
  for (const SustainedResult& r : results) {
    if (r.peers.empty()) {
      table.add({r.facts.problem.name, std::string(r.facts.problem.op->name), r.facts.unsupported});
    }
    for (const Measured& m : r.peers) table.add(table_row(r, m));
  }
  return table.to_string();
}

Json to_json(const SustainedResult& r, const SustainedProtocol& p) {
  Json out = to_json(r.facts);
  if (r.peers.empty()) return out;
  out["flop"] = r.facts.flops;
  out["bytes"] = r.facts.bytes;
  out["check_max_error"] = r.facts.max_error;
  out["protocol"] = {{"warm_seconds", p.warm_seconds},
                     {"timed_seconds", p.timed_seconds},
                     {"turns", p.turns},
                     {"chunk_seconds", p.chunk_seconds}};
  out["peers"] = out["ratios"] = out["of_dense"] = Json::object();
  const bool has_dense = r.peers.back().name == "dense";
  for (const Measured& m : r.peers) {
    out["peers"][m.name] = to_json(m);
    if (m.name == "dense") continue;
    if (m.name != "moire") out["ratios"]["moire / " + m.name] = to_json(time_ratio(r.peers[0], m));
    if (has_dense) out["of_dense"][m.name] = to_json(rate_ratio(m, r.peers.back()));
  }
  return out;
}

int run_sustained_bench(const Context& context, const std::vector<Group>& groups,
                        const Options& options) {
  const SustainedProtocol protocol;
  GpuBench bench(context, GpuBench::Facts::kNone);
  const auto nvml = Nvml::open(bench.gpu().bus_id());
  const auto num_stretches = static_cast<int64_t>(groups.size()) * (kVariants * protocol.turns + 1);
  const double setup = kSecondsPerProblem * static_cast<double>(groups.size());
  std::fputs(sustained_plan(protocol, num_stretches, setup).c_str(), stderr);
  std::function<PowerReading()> read;
  if (nvml.ok()) {
    read = [&] { return nvml.value().read(); };
  } else {
    const std::string why = nvml.status().message();
    std::fprintf(stderr, "no power, clock or energy: %s\n", why.c_str());
  }
  const std::unique_ptr<Meter> meter = make_meter(read);
  std::vector<SustainedResult> results;
  Progress progress("bench", num_stretches);
  int64_t done = 0;
  for (const Group& group : groups) {
    const Problem& problem = group.front();
    const std::string note = text(problem.name, " ", problem.op->name);
    progress.show(done, note);
    results.push_back(
        run_problem(bench, problem, protocol, *meter, [&] { progress.show(++done, note); }));
    if (!options.json) continue;
    progress.clear();
    print_json(to_json(results.back(), protocol));
  }
  if (!options.json) std::fputs(sustained_table(results).c_str(), stdout);
  const bool has_any = std::any_of(results.begin(), results.end(),
                                   [](const SustainedResult& r) { return !r.peers.empty(); });
  return has_any ? kExitOk : fail_for_nothing(options, "bench", "timed");
}

}  // namespace moire::tool
