// moire explain: what each step of a problem would run and why nothing faster. Runs nothing and
// touches no operand, so a model larger than the machine can be explained.
#include <moire/explain.h>

#include <cstdio>

#include "cases.h"
#include "commands.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

struct ExplainedCall : Call {
  Plan plan;  // whose status says why the call cannot run
};

int64_t sum_of(const Call::Kept& kept) {
  int64_t sum = 0;
  for (const auto& [name, bytes] : kept) sum += bytes;
  return sum;
}

// ", saves z 3.0 KiB, act 1.5 KiB"; nothing where nothing is kept.
std::string to_text(const char* what, const Call::Kept& kept) {
  const auto parts =
      words_of(kept, [](const auto& one) { return text(one.first, " ", human_bytes(one.second)); });
  return parts.empty() ? "" : text(", ", what, " ", join(parts, ", "));
}

Json to_json(const ExplainedCall& call) {
  Json out = {{"call", call.entry},
              {"workspace_bytes", call.plan.workspace_bytes},
              {"saved_bytes", sum_of(call.saved)},
              {"saved", call.saved},
              {"prepared_bytes", sum_of(*call.prepared)},
              {"prepared", *call.prepared},
              {"flops", call.flops},
              {"window_bytes", call.window_bytes},
              {"steps", Json::parse(moire::to_json(call.plan.steps))}};
  if (!call.plan.status.ok()) {
    out["error"] = {{"code", code_name(call.plan.status.code())},
                    {"message", call.plan.status.message()}};
  }
  return out;
}

void print_details(const Step& s) {
  print_line(6, "  ", s.op, ": ", s.problem);
  print_line(6, "    ", s.implementation, ": ", s.policy);
  for (const Refusal& r : s.refused) {
    const std::string who = paint(Colour::kYellow, text("not ", r.implementation, ":"));
    print_line(6, "    ", who, " ", r.reason);
  }
}

void print(const ExplainedCall& call) {
  std::string facts =
      text("workspace ", human_bytes(static_cast<int64_t>(call.plan.workspace_bytes)));
  facts += to_text("saves", call.saved) + to_text("reads", *call.prepared);
  if (call.window_bytes > 0) facts += text(", window ", human_bytes(call.window_bytes), " a rank");
  if (call.flops > 0) facts += text(", ", human_number(call.flops / 1e9), " GFLOP");
  std::printf("\n");
  print_line(4, paint(Colour::kBold, call.entry), "  (", facts, ")");
  Table table({"  step", "runs on", ">launches", ">reads", ">writes", ">workspace"});
  for (const Step& s : call.plan.steps) {
    table.add({"  " + s.op, s.implementation, std::to_string(s.launches), human_bytes(s.bytes_read),
               human_bytes(s.bytes_written), human_bytes(s.workspace_bytes)});
  }
  if (!call.plan.steps.empty()) std::printf("%s", table.to_string().c_str());
  for (const Step& s : call.plan.steps) print_details(s);
  if (!call.plan.status.ok()) {
    print_line(4, "  ", paint(Colour::kRed, "cannot run:"), " ", call.plan.status.message());
  }
}

void print_totals(const std::vector<ExplainedCall>& calls) {
  int64_t launches = 0, read = 0, written = 0, saved = 0;
  for (const ExplainedCall& call : calls) {
    saved += sum_of(call.saved);
    for (const Step& s : call.plan.steps) {
      launches += s.launches;
      read += s.bytes_read;
      written += s.bytes_written;
    }
  }
  std::printf("\n");
  print_line(2, "total: ", launches, " launches, reads ", human_bytes(read), ", writes ",
             human_bytes(written), ", saves ", human_bytes(saved));
}

}  // namespace

int run_explain(const Options& options) {
  const Context context = open_context(options, true);
  const std::string& planned = context.options().plan_for;
  const std::string where(planned.empty() ? device_name(context.device()) : planned);
  int exit_code = kExitOk;
  bool is_first = true;
  for (const Problem& problem : collect_problems(options)) {
    Case what(problem, Operands::Content::kNone);
    std::vector<ExplainedCall> calls;
    for (const Call& call : what.calls) {
      calls.push_back({call, plan(context, call, what.operands)});
      if (!calls.back().plan.status.ok()) exit_code = kExitFailed;
    }
    if (options.json) {
      Json out = {{"problem", to_line(problem)}, {"device", where}};
      for (const ExplainedCall& call : calls) out["calls"].push_back(to_json(call));
      print_json(out);
      continue;
    }
    std::printf("%s%s\n", is_first ? "" : "\n",
                paint(Colour::kDim, wrap_data(to_line(problem))).c_str());
    if (!planned.empty()) std::printf("planned for %s, on which nothing has run\n", where.c_str());
    is_first = false;
    for (const ExplainedCall& call : calls) print(call);
    print_totals(calls);
  }
  return exit_code;
}

}  // namespace moire::tool
