#include "case_runner.h"

#include <algorithm>

#include "cases.h"
#include "text.h"

namespace moire::tool {
namespace {

Verdict stopped(Verdict verdict, const Call& call, const Status& status) {
  verdict.kind =
      status.code() == Code::kUnsupported ? Verdict::Kind::kUnsupported : Verdict::Kind::kFailed;
  verdict.reason = text(call.entry, " returned ", code_name(status.code()), ": ", status.message());
  return verdict;
}

}  // namespace

double Verdict::max_error() const {
  double largest = 0;
  for (const CallVerdict& call : calls) {
    for (const OutputErrors& e : call.outputs) largest = std::max(largest, e.max_error);
  }
  return largest;
}

double Verdict::rms_error() const {
  double largest = 0;
  for (const CallVerdict& call : calls) {
    for (const OutputErrors& e : call.outputs) largest = std::max(largest, e.rms_error);
  }
  return largest;
}

Verdict judge(const Context& context, const Problem& problem) {
  Operands operands(problem, Operands::Content::kHostile);
  const Case what = make_case(operands);
  Verdict verdict;
  for (const Call& call : what.calls) {
    size_t workspace_bytes = 0;
    if (call.workspace != nullptr) {
      const Status status = call.workspace(context, &workspace_bytes);
      if (!status.ok()) return stopped(verdict, call, status);
    }
    const Workspace workspace = operands.workspace(workspace_bytes);
    const Call::Judge compare = call.expect();
    const Status ran = call.run(context, workspace);
    if (!ran.ok()) return stopped(verdict, call, ran);
    const Status checked = context.check();
    if (!checked.ok()) return stopped(verdict, call, checked);
    Comparison comparison(operands);
    compare(comparison);
    verdict.calls.push_back({call.entry, comparison.outputs()});
    if (!comparison.passed()) verdict.kind = Verdict::Kind::kFailed;
    const std::string broken = operands.first_broken_guard();
    if (!broken.empty()) {
      verdict.kind = Verdict::Kind::kFailed;
      verdict.reason = text(call.entry, " wrote outside of ", broken);
    }
    // What a backward would read is wrong already.
    if (verdict.kind == Verdict::Kind::kFailed) return verdict;
  }
  return verdict;
}

}  // namespace moire::tool
