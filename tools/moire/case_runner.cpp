#include "case_runner.h"

#include <algorithm>
#include <stdexcept>

#include "cases.h"
#include "reference/outputs.h"
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

Verdict judge(const Context& context, const Problem& problem) {
  Case what(problem, Operands::Content::kHostile);
  Verdict verdict;
  for (const Call& call : what.calls) {
    size_t workspace_bytes = 0;
    Status status = call.workspace(context, &workspace_bytes);
    if (!status.ok()) return stopped(verdict, call, status);
    const Workspace workspace = what.operands.workspace(workspace_bytes);
    const Call::Judge compare = call.expect(context.device());
    status = call.run(context, workspace);
    if (status.ok()) status = context.check();
    if (!status.ok()) return stopped(verdict, call, status);
    verdict.calls.push_back({call.entry, compare()});
    for (const OutputErrors& e : verdict.calls.back().outputs) {
      verdict.max_error = std::max(verdict.max_error, e.max_error);
      verdict.rms_error = std::max(verdict.rms_error, e.rms_error);
    }
    if (!reference::all_passed(verdict.calls.back().outputs)) verdict.kind = Verdict::Kind::kFailed;
    const std::string broken = what.operands.first_broken_guard();
    if (!broken.empty()) {
      verdict.kind = Verdict::Kind::kFailed;
      verdict.reason = text(call.entry, " wrote outside of ", broken);
    }
    // What a backward would read is wrong already.
    if (verdict.kind == Verdict::Kind::kFailed) return verdict;
  }
  return verdict;
}

void require_right_rows(Device device, const Operands& operands, const std::vector<Call>& calls) {
  const Problem& p = operands.problem();
  // Accumulated results are gone by now; wider matrices take the reference gigabytes.
  constexpr int64_t kWidestMatrix = int64_t{40} << 20;
  if (p.rows == 0 || p.beta != 0 || 2 * p.hidden * p.ffn > kWidestMatrix) return;
  const std::vector<int64_t>& splits = operands.splits();
  const auto largest = std::max_element(splits.begin(), splits.end()) - splits.begin();
  const int64_t rows[] = {operands.groups().offsets[largest], p.rows - 1};
  for (const Call& call : calls) {
    for (const int64_t row : rows) {
      if (call.expect_row == nullptr) continue;
      for (const OutputErrors& e : call.expect_row(device, row, operands.group_of(row))()) {
        if (e.mismatches == 0) continue;
        throw std::runtime_error(text("bench: the result of ", to_line(p),
                                      " is wrong, so its time means nothing: ", call.entry, ": ",
                                      e.name, " of row ", row, ": ", e.mismatches, " of ",
                                      e.elements, " elements wrong, ", e.first_mismatch));
      }
    }
  }
}

}  // namespace moire::tool
