// moire errors: how far each recipe's whole MLP is from the exact function of its inputs.
#include <moire/grouped_mlp.h>

#include <cmath>
#include <cstdio>

#include "cases.h"
#include "commands.h"
#include "problem_source.h"
#include "reference/grouped_mlp.h"
#include "reference/outputs.h"
#include "terminal.h"
#include "text.h"

namespace moire::tool {
namespace {

struct Row {
  const char* name;
  std::vector<std::string> settings;
};

const Row kRows[] = {
    {"fp32", {"dtype=fp32"}},
    {"fp16", {"dtype=fp16"}},
    {"bf16", {"dtype=bf16"}},
    {"mxfp8", {"dtype=mxfp8"}},
    {"mxfp8, gradients E5M2", {"dtype=mxfp8", "element=e5m2"}},
    {"mxfp8_fast, emulated", {"dtype=mxfp8_fast", "emulated=yes"}},
    {"fp8_block", {"dtype=fp8_block"}},
    {"fp8_block, fractional", {"dtype=fp8_block", "fractional=yes"}},
    {"fp8_block, emulated", {"dtype=fp8_block", "emulated=yes"}},
};

const std::vector<std::string> kOutputs = {"y", "grad_x", "grad_w1", "grad_w2", "grad_probs"};

// By the names of kOutputs; NaN where the layer has none.
Json errors_of(const Context& context, const Problem& p) {
  Case what(p, Operands::Content::kNormal);
  const auto forward = std::any_cast<GroupedMlpArgs>(what.calls[0].args);
  auto backward = std::any_cast<GroupedMlpBackwardArgs>(what.calls[1].args);
  const auto results = reference::grouped_mlp(forward, reference::Rounding::kNone);
  // The exact backward starts from the exact z, and from what gradients are added to.
  const TensorView z = what.operands.output("exact z", DType::kFP64, {p.capacity(), p.fc1_width()});
  for (size_t i = 0; i < results.z.values.size(); ++i) {
    static_cast<double*>(z.data)[i] = results.z.values[i].value;
  }
  backward.z = z;
  backward.act = {}, backward.act_is_saved = 0;
  const auto gradients = reference::grouped_mlp_backward(backward, reference::Rounding::kNone);
  for (const Call& call : what.calls) {
    size_t bytes = 0;
    usage(call.workspace(context, &bytes));
    usage(call.run(context, what.operands.workspace(bytes)));
  }
  Json errors;
  for (const std::string& name : kOutputs) errors[name] = std::nan("");
  for (const auto& outputs : {reference::compare_outputs(forward, results),
                              reference::compare_outputs(backward, gradients)}) {
    for (const OutputErrors& e : outputs) {
      if (errors.contains(e.name)) errors[e.name] = e.relative_rms;
    }
  }
  return errors;
}

// The problem of each row; nothing is printed where one has fields that its recipe does not.
std::vector<Problem> problems_of(const Problem& p) {
  std::vector<Problem> out;
  for (const Row& row : kRows) {
    try {
      out.push_back(sensible(with_settings(p, row.settings)));
    } catch (const UsageError& error) {
      throw UsageError("errors: of its row ", row.name, ": ", error.what());
    }
  }
  return out;
}

void print_row(const Row& row, const Json& errors) {
  std::string line = text("| ", row.name, " |");
  for (const double e : errors) line += std::isnan(e) ? " - |" : printed(" %.1e |", e);
  std::printf("%s\n", line.c_str());
}

}  // namespace

int run_errors(const Options& options) {
  const Context context = open_context(options);
  for (const Problem& p : collect_problems(options)) {
    if (!p.is("mlp") || p.rows == 0 || !options.dtypes.empty()) {
      throw UsageError("errors: found \"", to_line(p),
                       "\", needed op=mlp with rows, and no --dtype: each recipe has its own");
    }
    const std::vector<Problem> problems = problems_of(p);
    for (const Problem& of_recipe : problems) require_memory_for(context, of_recipe);
    if (!options.json) {
      std::printf("%s\n\n| Recipe | %s |\n|---|---|---|---|---|---|\n",
                  wrap_data(text("`", to_line(p), "`")).c_str(), join(kOutputs, " | ").c_str());
    }
    Progress progress("recipes", static_cast<int64_t>(std::size(kRows)));
    for (size_t i = 0; i < problems.size(); ++i) {
      const Row& row = kRows[i];
      progress.show(static_cast<int64_t>(i), row.name);
      const Json errors = errors_of(context, problems[i]);
      progress.clear();
      if (options.json) {
        print_json({{"problem", to_line(p)}, {"recipe", row.name}, {"relative_rms", errors}});
      } else {
        print_row(row, errors);
      }
      std::fflush(stdout);
    }
  }
  return kExitOk;
}

}  // namespace moire::tool
